"""Checkpoints: orbax's format, restored on any number of devices at any stage.

Start with :class:`Checkpointer`. A training state comes in, and ``STEP/state`` with the record
``STEP/zerojax.json`` comes out; a restore returns the state with the shardings of an abstract one.
In reading order:

- ``checkpointer``: the public class. ``state_tree``: the tree on disk. ``record``: the record.
- ``writer``, ``pending``: a save in the background; ``piecewise``: arrays that orbax cannot write;
  ``retention``: the steps to keep; ``steps_folder``: disk or bucket.
- ``restore``, ``matching``, ``saved``: a restore, and a step on disk. ``checksum``: of arrays.
- ``processes``, ``errors``: one outcome in all processes.
- ``exporter``, ``naming``, ``inspection``: work on the files only. ``preemption``: SIGTERM.
"""

from zerojax.checkpoint.checkpointer import Checkpointer as Checkpointer
from zerojax.checkpoint.errors import CheckpointError as CheckpointError
from zerojax.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from zerojax.checkpoint.exporter import export as export
from zerojax.checkpoint.inspection import inspect as inspect
from zerojax.checkpoint.preemption import PREEMPTED as PREEMPTED
from zerojax.checkpoint.preemption import Preemption as Preemption
