"""What a checkpoint holds and whether it is whole, from its files alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from etils import epath

from zerojax.checkpoint import saved
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.look import Look, Step
from zerojax.checkpoint.writer import DELETED

Progress = Callable[[int, int], None]
"""Called with the bytes of arrays that are read, and with all there are to read."""

_TMP = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect` found.

    Attributes:
      checkpoint: the path that was given.
      steps: oldest first.
      unfinished: names of folders that a save is writing, or a killed run left.
      deleted: names of steps that wait for their removal.
    """

    checkpoint: str
    steps: tuple[Step, ...]
    unfinished: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def damaged(self) -> tuple[Step, ...]:
        """The steps with problems."""
        return tuple(step for step in self.steps if step.problems)

    @property
    def newest_whole(self) -> Step | None:
        """The newest step that is what was saved, as far as was looked."""
        whole = (step for step in reversed(self.steps) if step.status in ("whole", "files whole"))
        return next(whole, None)


def inspect(
    checkpoint: epath.PathLike,
    *,
    quick: bool = False,
    step: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Reads every step at a path and lists all that is wrong with it; no device is touched.

    Args:
      checkpoint: a folder of steps, or one step's folder.
      quick: look at records and files, and do not read the arrays. Files of up to 16 MB are
        compared whole even so, larger ones by their size.
      step: only this one.
      progress: see ``Progress``.

    Raises:
      CheckpointError: nothing is there, it is no checkpoint, or it has no such step.
    """
    root = epath.Path(checkpoint)
    found = [Look(folder) for folder in _at(root, step)]
    todo = 0 if quick else sum(leaf.bytes for look in found for leaf in look.leaves)
    done = 0
    for look in found if not quick else ():
        for n in look.read():
            done += n
            if progress:
                progress(done, todo)
    # A run that goes on may have removed one meanwhile, which is no damage.
    removed = [look.folder.name for look in found if not look.folder.exists()]
    return Inspection(
        checkpoint=str(checkpoint),
        steps=tuple(look.found(quick) for look in found if look.folder.name not in removed),
        unfinished=tuple(_unfinished(root)),
        deleted=(*_names(root / DELETED), *removed),
    )


def _at(root: epath.Path, step: int | None) -> list[epath.Path]:
    try:
        return saved.at(root, step)
    except CheckpointError as error:
        if unfinished := _unfinished(root):
            raise CheckpointError(
                f"{error}. {', '.join(unfinished)} is being saved, or a killed run left it"
            ) from None
        raise


def _names(folder: epath.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _unfinished(root: epath.Path) -> list[str]:
    return [name for name in _names(root) if _TMP in name]
