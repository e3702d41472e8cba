"""Inspection of a checkpoint: its contents and its integrity, from its files only."""

from __future__ import annotations

import contextlib
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

Status = Literal["complete", "files complete", "not verifiable", "damaged"]

Progress = Callable[[int, int], None]
"""A callback, called with the bytes of arrays read so far and the bytes of all arrays."""


@dataclass(frozen=True)
class InspectedArray:
    """An array of a step.

    Attributes:
      spec: Its PartitionSpec when it was saved; None if unknown.
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
    """A step as found on disk.

    Attributes:
      folder: Its path.
      status: ``"complete"``: every array equals the saved one; ``"files complete"``: sizes and
        digests of the files match, and arrays were not read; ``"not verifiable"``: no record
        exists to compare with, or the operating system refuses to read the files;
        ``"damaged"``: there are problems.
      form: The kind of state; None if the arrays fit none that zerojax knows.
      record: The record that zerojax wrote; None for plain orbax.
      arrays: The arrays that can be opened.
      bytes_on_disk: The total size of its files.
      problems: All damage, each entry with the file or the array.
      notes: The reasons why the step could not be verified.
    """

    folder: str
    status: Status
    form: Form | None
    record: Record | None
    arrays: tuple[InspectedArray, ...]
    bytes_on_disk: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def step(self) -> int | None:
        """Its number; None for a folder without a record whose name is not a step number."""
        named = steps_folder.step_of(epath.Path(self.folder))
        return self.record.step if self.record and named is None else named

    @property
    def saved(self) -> str | None:
        """The time of the save, ISO 8601 in UTC; None for plain orbax."""
        return self.record.saved if self.record else None

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by group, in the order of groups."""
        sizes = dict.fromkeys(("parameters", "optimizer state", "other state"), 0)
        for array in self.arrays:
            sizes[array.group] += array.bytes
        return sizes

    @property
    def dtypes(self) -> dict[str, int]:
        """Bytes by dtype, largest first."""
        sizes: Counter[str] = Counter()
        for array in self.arrays:
            sizes[array.dtype] += array.bytes
        return dict(sizes.most_common())


@dataclass(frozen=True)
class Inspection:
    """The steps at a path.

    Attributes:
      checkpoint: The path passed to :func:`inspect`.
      steps: The steps, oldest first.
      unfinished: Names of folders that a save is writing, or that a killed run left.
      deleted: Names of steps that await their removal.
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
    def newest_intact(self) -> InspectedStep | None:
        """The newest step without problems that could be verified."""
        intact = (
            step for step in reversed(self.steps) if step.status in ("complete", "files complete")
        )
        return next(intact, None)


def inspect(
    checkpoint: epath.PathLike,
    *,
    quick: bool = False,
    step: int | None = None,
    progress: Progress | None = None,
) -> Inspection:
    """Reads every step at a path and lists all damage; touches no device.

    Args:
      checkpoint: A folder of steps, or one step's folder.
      quick: Read records and files, but no arrays. Files of up to 16 MB are still compared by
        their CRC-32, larger ones by their size.
      step: The only step to inspect; all by default.
      progress: See ``Progress``.

    Raises:
      CheckpointError: the path does not exist, holds no checkpoint, or lacks the step.
    """
    root = steps_folder.require_answer(steps_folder.path_of(checkpoint))
    steps = [StepInspector(folder) for folder in _at(root, step)]
    total = 0 if quick else sum(array.bytes for inspector in steps for array in inspector.arrays)
    done = 0
    for inspector in steps if not quick else ():
        for n in inspector.read():
            done += n
            if progress:
                progress(done, total)
    # A job that is still running may have removed a step meanwhile, which is not damage.
    removed = [inspector.folder.name for inspector in steps if not inspector.folder.exists()]
    return Inspection(
        checkpoint=str(checkpoint),
        steps=tuple(
            inspector.result(quick) for inspector in steps if inspector.folder.name not in removed
        ),
        unfinished=tuple(_unfinished(root)),
        deleted=(*_names(root / DELETED), *removed),
    )


def _at(root: epath.Path, step: int | None) -> list[epath.Path]:
    try:
        return saved.at(root, step)
    except CheckpointError as error:
        if unfinished := _unfinished(root):
            raise CheckpointError(f"{error}. {', '.join(unfinished)} is unfinished") from None
        raise


def _names(folder: epath.Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _unfinished(root: epath.Path) -> list[str]:
    return [name for name in _names(root) if UNDER_WAY in name]


class StepInspector:
    """An inspection of one step, which collects errors instead of stopping at the first.

    Attributes:
      folder: The step's folder.
      arrays: The arrays that can be opened.
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
            for error in records.find_changes(folder, self._record):
                self._note(error)
        with self._noted():
            self._saved = SavedArrays(folder)
            self._problems += unlike(self._saved, self._record)
            for name in self._saved.names:
                with self._noted():
                    self.arrays.append(self._saved.array(name))
        if not (self._record or self._problems or self._notes):
            self._notes.append(f"no {records.FILE} (saved by plain orbax): nothing to compare with")

    def read(self) -> Iterator[int]:
        """Reads every array and compares it with the record; yields the bytes of each block."""
        for array in self.arrays:
            remaining = array.bytes
            with self._noted():
                for n in self._read(array):
                    remaining -= n
                    yield n
            yield remaining

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
            self._problems.append(f"{self._saved.item}: {array.name} differs from what was saved")

    def result(self, quick: bool) -> InspectedStep:
        """Returns the step as inspected so far; ``quick`` if :meth:`read` was skipped."""
        record = self._record
        form = record.form if record else _form(self.arrays)
        intact: Status = "files complete" if quick else "complete"
        return InspectedStep(
            folder=str(self.folder),
            status="damaged" if self._problems else "not verifiable" if self._notes else intact,
            form=form,
            record=record,
            arrays=tuple(_inspected(array, form, record) for array in self.arrays),
            bytes_on_disk=self._bytes,
            problems=tuple(self._problems),
            notes=tuple(self._notes),
        )

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Collects an error instead of raising it."""
        try:
            yield
        except CheckpointError as error:
            self._note(error)
        except OSError as error:
            self._note(cannot_be_read(self.folder, error))

    def _note(self, error: CheckpointError) -> None:
        messages = self._problems if isinstance(error, DamagedCheckpointError) else self._notes
        if str(error) not in messages:
            messages.append(str(error))


def _inspected(array: SavedArray, form: Form | None, record: Record | None) -> InspectedArray:
    recorded = record.leaves.get(array.name) if record else None
    group = "other state"
    optimizer_group = "optimizer state"
    groups = (PARAMS, "parameters"), (OPTIMIZER, optimizer_group), (NUMBERS, optimizer_group)
    for prefixes, label in groups:
        prefix = prefixes.get(form) if form else None
        if prefix and array.path[: len(prefix)] == prefix:
            group = label
    return InspectedArray(
        name=array.name,
        shape=recorded.shape if recorded else array.shape,
        dtype=recorded.dtype if recorded else str(array.dtype),
        spec=recorded.spec if recorded else None,
        bytes=array.bytes,
        group=group,
    )


def _form(arrays: list[SavedArray]) -> Form | None:
    """Infers the form of a step without a record from the names of its arrays."""
    roots = {array.path[0] for array in arrays}
    if roots >= {"0", "1"} and all(name.isdecimal() for name in roots):
        return "nnx"
    return "linen" if "params" in roots else None
