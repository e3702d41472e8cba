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
from zerojax.checkpoint import saved, steps_folder
from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError, cannot_be_read
from zerojax.checkpoint.record import Record, Spec
from zerojax.checkpoint.saved import SavedArray, SavedArrays, alike, differs, unlike
from zerojax.checkpoint.state_tree import NUMBERS, OPTIMIZER, PARAMS, Form
from zerojax.checkpoint.steps_folder import DELETED, UNDER_WAY

Status = Literal["whole", "files whole", "not verifiable", "damaged"]

Progress = Callable[[int, int], None]
"""Called with the bytes of arrays read so far, and the bytes of all arrays."""


@dataclass(frozen=True)
class InspectedArray:
    """An array of a step.

    Attributes:
      spec: Its PartitionSpec when it was saved; None where unknown.
      group: "parameters", "optimizer state" or "other state".
    """

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
      step: Its number; None for a folder without a record that no number names.
      folder: Its path.
      status: "whole": every array is as it was saved; "files whole": sizes and digests of files
        are, and arrays were not read; "not verifiable": no record exists to compare with, or the
        system does not give the files.
      saved: The time, ISO 8601 in UTC; None where unknown.
      form: The arrangement of its arrays; None where zerojax has no such arrangement.
      record: Zerojax's; None for plain orbax.
      arrays: Those that can be opened.
      bytes_on_disk: Of its files.
      problems: All that is wrong, each with the file or the array.
      notes: Why the step could not be verified.
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
    """The steps at a path.

    Attributes:
      checkpoint: The path that was given.
      steps: Oldest first.
      unfinished: Names of folders that a save is writing, or a killed run left.
      deleted: Names of steps that wait for their removal.
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
        """The newest step without problems that could be verified."""
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
      checkpoint: A folder of steps, or one step's folder.
      quick: Read records and files, and no arrays. Files of up to 16 MB are compared whole even
        so, larger ones by their size.
      step: Only this step.
      progress: See ``Progress``.

    Raises:
      CheckpointError: the path does not exist, holds no checkpoint, or has no such step.
    """
    root = steps_folder.path_of(checkpoint)
    steps = [StepInspector(folder) for folder in _at(root, step)]
    todo = 0 if quick else sum(array.bytes for one in steps for array in one.arrays)
    done = 0
    for one in steps if not quick else ():
        for n in one.read():
            done += n
            if progress:
                progress(done, todo)
    # A run that goes on may have removed a step meanwhile, which is no damage.
    removed = [one.folder.name for one in steps if not one.folder.exists()]
    return Inspection(
        checkpoint=str(checkpoint),
        steps=tuple(one.result(quick) for one in steps if one.folder.name not in removed),
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
    return [name for name in _names(root) if UNDER_WAY in name]


class StepInspector:
    """Inspects one step: collects all that is wrong, and goes on.

    Attributes:
      folder: Of the step.
      arrays: Those that can be opened.
    """

    def __init__(self, folder: epath.Path) -> None:
        self.folder = folder
        self._record: Record | None = None
        self._saved: SavedArrays | None = None
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._bytes = 0
        self.arrays: list[SavedArray] = []
        with self._noted():
            self._bytes = sum(size for _, size in records.sizes(folder))
        with self._noted():
            self._record = records.read(folder)
        if self._record:
            for error in records.changed(folder, self._record):
                self._note(error)
        with self._noted():
            self._saved = SavedArrays(folder)
            self._problems += unlike(self._saved, self._record)
            for name in self._saved.names:
                with self._noted():
                    self.arrays.append(self._saved.array(name))
        if not (self._record or self._problems or self._notes):
            self._notes.append(f"no {records.FILE}, as with plain orbax: nothing to compare with")

    def read(self) -> Iterator[int]:
        """Reads every array and compares it with the record; yields the bytes of each block."""
        for array in self.arrays:
            todo = array.bytes
            with self._noted():
                for n in self._read(array):
                    todo -= n
                    yield n
            yield todo

    def _read(self, array: SavedArray) -> Iterator[int]:
        assert self._saved
        checksum = 0
        for start, block in self._saved.blocks(array.name):
            checksum = (checksum + share(block, start)) % 2**32
            yield block.nbytes
        recorded = self._record.leaves.get(array.name) if self._record else None
        if recorded is None:
            return
        if not alike(array, recorded):
            self._problems.append(f"{self._saved.item}: {differs(array, recorded)}")
        elif checksum != recorded.checksum:
            self._problems.append(
                f"{self._saved.item}: {array.name} holds other numbers than were saved"
            )

    def result(self, quick: bool) -> InspectedStep:
        """The step as inspected so far; ``quick`` where :meth:`read` was left out."""
        record = self._record
        form = record.form if record else _form(self.arrays)
        whole: Status = "files whole" if quick else "whole"
        named = steps_folder.step_of(self.folder)
        return InspectedStep(
            step=record.step if record and named is None else named,
            folder=str(self.folder),
            status="damaged" if self._problems else "not verifiable" if self._notes else whole,
            saved=record.saved if record else _committed(self.folder),
            form=form,
            record=record,
            arrays=tuple(_inspected(array, form, record) for array in self.arrays),
            bytes_on_disk=self._bytes,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
        )

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Collects an error in place of raising it."""
        try:
            yield
        except CheckpointError as error:
            self._note(error)
        except OSError as error:
            self._note(cannot_be_read(self.folder, error))

    def _note(self, error: CheckpointError) -> None:
        told = self._problems if isinstance(error, DamagedCheckpointError) else self._notes
        if str(error) not in told:
            told.append(str(error))


def _inspected(array: SavedArray, form: Form | None, record: Record | None) -> InspectedArray:
    recorded = record.leaves.get(array.name) if record else None
    group = "other state"
    of_optimizer = "optimizer state"
    groups = (PARAMS, "parameters"), (OPTIMIZER, of_optimizer), (NUMBERS, of_optimizer)
    for prefixes, called in groups:
        prefix = prefixes.get(form) if form else None
        if prefix and array.path[: len(prefix)] == prefix:
            group = called
    return InspectedArray(
        name=array.name,
        shape=recorded.shape if recorded else array.shape,
        dtype=recorded.dtype if recorded else str(array.dtype),
        spec=recorded.spec if recorded else None,
        bytes=array.bytes,
        group=group,
    )


def _form(arrays: list[SavedArray]) -> Form | None:
    """The arrangement of a step without a record, by the names of its arrays."""
    first = {array.path[0] for array in arrays}
    if first >= {"0", "1"} and all(name.isdecimal() for name in first):
        return "nnx"
    return "linen" if "params" in first else None


def _committed(folder: epath.Path) -> str | None:
    """The time of orbax's commit, ISO 8601 in UTC; None where unknown."""
    try:
        about = json.loads(steps_folder.read(folder / "_CHECKPOINT_METADATA").decode())
        at = datetime.datetime.fromtimestamp(about["commit_timestamp_nsecs"] / 1e9, datetime.UTC)
    except records.UNREADABLE:
        return None
    return at.isoformat(timespec="seconds")
