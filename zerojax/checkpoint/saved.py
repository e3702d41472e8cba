"""A saved step whose files are as they were written, and where the steps of a folder are."""

from __future__ import annotations

import re

from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint.arrays import STATE as STATE
from zerojax.checkpoint.arrays import Arrays, contents, item_of
from zerojax.checkpoint.arrays import Leaf as Leaf
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.record import Record

_STEP = re.compile(r"\d+")


class Saved(Arrays):
    """The step in ``folder``, written by zerojax or by plain orbax.

    Attributes:
      record: zerojax's; None where plain orbax wrote the step.

    Raises:
      CheckpointError: a newer zerojax wrote it.
      DamagedCheckpointError: there are no arrays, the record is missing or cannot be read, or
        files differ from it.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        self.record: Record | None = records.read(epath.Path(folder))
        if self.record and (problems := records.changed(epath.Path(folder), self.record)):
            raise DamagedCheckpointError("\n".join(problems))
        super().__init__(folder)
        if problems := unlike(self, self.record):
            raise DamagedCheckpointError("\n".join(problems))


def unlike(arrays: Arrays, record: Record | None) -> list[str]:
    """What the record and orbax's own list of the arrays do not agree on, one line each."""
    if record is None:
        file = arrays.folder / records.FILE
        return [f"{file} is missing"] if arrays.recorded and not file.exists() else []
    lost = [f"{name} is missing" for name in record.leaves if name not in arrays.names]
    new = [f"{name} was not saved" for name in arrays.names if name not in record.leaves]
    return [f"{arrays.item}: {problem}" for problem in lost + new]


def folders(directory: epath.PathLike) -> dict[int, epath.Path]:
    """The steps below ``directory`` that were written to the end, in order, and where."""
    root = epath.Path(directory)
    there = root.iterdir() if root.is_dir() else ()
    found = {int(entry.name): entry for entry in there if _STEP.fullmatch(entry.name)}
    return dict(sorted(found.items()))


def steps(directory: epath.PathLike) -> list[int]:
    """The steps below ``directory`` that were written to the end, in order."""
    return [*folders(directory)]


def at(checkpoint: epath.PathLike, step: int | None = None) -> list[epath.Path]:
    """The folders of the steps at a path, in order: itself, or those within a folder of steps.

    Args:
      checkpoint: the path.
      step: only this one.

    Raises:
      CheckpointError: nothing is there, it is no checkpoint, or it has no such step.
    """
    root = epath.Path(checkpoint)
    if not root.exists():
        raise CheckpointError(f"{root} does not exist")
    if root.name == STATE and (root.parent / records.FILE).exists():
        root = root.parent
    if step is None and root.is_dir() and (item_of(root) or (root / records.FILE).exists()):
        return [root]
    there = folders(root)
    if not there:
        raise CheckpointError(
            f"{root} holds no checkpoint: {contents(root)}; expected folders named by step, as 100/"
        )
    if step is not None and step not in there:
        raise CheckpointError(f"{root} has no step {step}; it has {', '.join(map(str, there))}")
    return [folder for n, folder in there.items() if step in (None, n)]


def find(checkpoint: epath.PathLike, step: int | None = None) -> Saved:
    """The step at a path: a step's folder, or a folder of steps, of which the newest by default.

    Raises:
      CheckpointError: see :func:`at`.
      DamagedCheckpointError: see :class:`Saved`.
    """
    return Saved(at(checkpoint, step)[-1])
