"""What a checkpoint holds and whether it is whole, from its files alone."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import saved
from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.record import LeafRecord, Record, Spec
from zerojax.checkpoint.saved import SavedArray, SavedArrays, unlike
from zerojax.checkpoint.state_tree import OPTIMIZER, PARAMS, Form
from zerojax.checkpoint.writer import DELETED

Status = Literal["whole", "files whole", "not verifiable", "damaged"]

Progress = Callable[[int, int], None]
"""Called with the bytes of arrays that are read, and with all there are to read."""

_TMP = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class InspectedArray:
    """An array of a step: ``group`` is "parameters", "optimizer state" or "other state"; ``spec``
    None where it is not known."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    bytes: int
    group: str


@dataclass(frozen=True)
class InspectedStep:
    """A step as it stands on disk.

    Attributes:
      step: its number; None for a folder that is not named by one and has no record.
      folder: where.
      status: "whole": every array is what was saved; "files whole": as far as sizes and digests
        of files tell; "not verifiable": it can be read, and there is no record to compare it with.
      saved: when, ISO 8601 in UTC, if that is known.
      form: how its arrays are arranged, if they are as zerojax arranges them.
      record: all else that was noted when it was saved; None for plain orbax.
      arrays: those that can be opened.
      bytes_on_disk: of its files.
      problems: everything that is wrong, each with the file or the array.
      notes: why it could not be verified.
    """

    step: int | None
    folder: str
    status: Status
    saved: str | None
    form: Form | None
    record: Record | None
    arrays: tuple[InspectedArray, ...]
    bytes_on_disk: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by group, in the order of groups."""
        sizes = dict.fromkeys(("parameters", "optimizer state", "other state"), 0)
        for array in self.arrays:
            sizes[array.group] += array.bytes
        return sizes

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, the most first."""
        sizes: Counter[str] = Counter()
        for array in self.arrays:
            sizes[array.dtype] += array.bytes
        return dict(sizes.most_common())


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
    steps: tuple[InspectedStep, ...]
    unfinished: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def damaged(self) -> tuple[InspectedStep, ...]:
        """The steps with problems."""
        return tuple(step for step in self.steps if step.problems)

    @property
    def newest_whole(self) -> InspectedStep | None:
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
    found = [StepInspector(folder) for folder in _at(root, step)]
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


class StepInspector:
    """A look at one step: whatever is wrong with it is noted, and the look goes on.

    Attributes:
      folder: of the step.
      leaves: the arrays that can be opened.
    """

    def __init__(self, folder: epath.Path) -> None:
        self.folder = folder
        self._record: Record | None = None
        self._arrays: SavedArrays | None = None
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._bytes = 0
        self.leaves: list[SavedArray] = []
        with self._noted():
            self._bytes = sum(size for _, size in records.sizes(folder))
        with self._noted():
            self._record = records.read(folder)
        if self._record:
            self._problems += records.changed(folder, self._record)
        with self._noted():
            self._arrays = SavedArrays(folder)
            self._problems += unlike(self._arrays, self._record)
            for name in self._arrays.names:
                with self._noted():
                    self.leaves.append(self._arrays.leaf(name))
        if not (self._record or self._problems or self._notes):
            self._notes.append(f"no {records.FILE}, as with plain orbax: nothing to compare with")

    def read(self) -> Iterator[int]:
        """Reads every array and compares it with the record; gives bytes as they are done."""
        for leaf in self.leaves:
            todo = leaf.bytes
            with self._noted():
                for n in self._read(leaf):
                    todo -= n
                    yield n
            yield todo

    def _read(self, leaf: SavedArray) -> Iterator[int]:
        assert self._arrays
        where = f"{self._arrays.item}: {leaf.name}"
        checksum = 0
        for start, block in self._arrays.blocks(leaf.name):
            checksum = (checksum + share(block, start)) % 2**32
            yield block.nbytes
        recorded = self._record.leaves.get(leaf.name) if self._record else None
        if recorded is None:
            return
        if not _alike(leaf, recorded):
            self._problems.append(
                f"{where} is {leaf.dtype}{[*leaf.shape]}, saved was "
                f"{recorded.dtype}{[*recorded.shape]}"
            )
        elif checksum != recorded.checksum:
            self._problems.append(f"{where} holds other numbers than were saved")

    def found(self, quick: bool) -> InspectedStep:
        """All that is known now."""
        record = self._record
        form = record.form if record else _form(self.leaves)
        whole: Status = "files whole" if quick else "whole"
        named = int(self.folder.name) if self.folder.name.isdecimal() else None
        return InspectedStep(
            step=record.step if record and named is None else named,
            folder=str(self.folder),
            status="damaged" if self._problems else "not verifiable" if self._notes else whole,
            saved=record.saved if record else _committed(self.folder),
            form=form,
            record=record,
            arrays=tuple(_array(leaf, form, record) for leaf in self.leaves),
            bytes_on_disk=self._bytes,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
        )

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except (DamagedCheckpointError, OSError) as error:
            self._problems.append(str(error))
        except CheckpointError as error:
            self._notes.append(str(error))


def _alike(leaf: SavedArray, recorded: LeafRecord) -> bool:
    if recorded.dtype.startswith("key<"):  # on disk its data is
        return leaf.shape[: len(recorded.shape)] == recorded.shape and leaf.dtype == "uint32"
    return leaf.shape == recorded.shape and str(leaf.dtype) == recorded.dtype


def _array(leaf: SavedArray, form: Form | None, record: Record | None) -> InspectedArray:
    recorded = record.leaves.get(leaf.name) if record else None
    group = "other state"
    for prefixes, called in ((PARAMS, "parameters"), (OPTIMIZER, "optimizer state")):
        if form and leaf.path[: len(prefixes[form])] == prefixes[form]:
            group = called
    return InspectedArray(
        name=leaf.name,
        shape=recorded.shape if recorded else leaf.shape,
        dtype=recorded.dtype if recorded else str(leaf.dtype),
        spec=recorded.spec if recorded else None,
        bytes=leaf.bytes,
        group=group,
    )


def _form(leaves: list[SavedArray]) -> Form | None:
    """Of a step without a record, by its names."""
    first = {leaf.path[0] for leaf in leaves}
    if first >= {"0", "1"} and all(name.isdecimal() for name in first):
        return "nnx"
    return "linen" if "params" in first else None


def _committed(folder: epath.Path) -> str | None:
    """When orbax says that it was done."""
    try:
        about = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
        at = datetime.datetime.fromtimestamp(about["commit_timestamp_nsecs"] / 1e9, datetime.UTC)
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return at.isoformat(timespec="seconds")
