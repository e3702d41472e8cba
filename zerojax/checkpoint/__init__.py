"""Checkpoints: orbax's format, restored on any number of devices at any stage.

See :class:`Checkpointer`.
"""

from zerojax.checkpoint.checkpointer import Checkpointer as Checkpointer
from zerojax.checkpoint.errors import CheckpointError as CheckpointError
from zerojax.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from zerojax.checkpoint.exporter import export as export
from zerojax.checkpoint.inspection import inspect as inspect
from zerojax.checkpoint.preemption import PREEMPTED as PREEMPTED
from zerojax.checkpoint.preemption import Preemption as Preemption
