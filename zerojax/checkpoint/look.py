"""One step as it stands on disk: what it holds, and all that is wrong with it."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint.arrays import Arrays, Leaf
from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.layout import OPTIMIZER, PARAMS, Form
from zerojax.checkpoint.record import LeafRecord, Record, Spec
from zerojax.checkpoint.saved import unlike

Status = Literal["whole", "files whole", "not verifiable", "damaged"]


@dataclass(frozen=True)
class Array:
    """An array of a step: ``group`` is "parameters", "optimizer state" or "other state"; ``spec``
    None where it is not known."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    bytes: int
    group: str


@dataclass(frozen=True)
class Step:
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
    arrays: tuple[Array, ...]
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


class Look:
    """A look at one step: whatever is wrong with it is noted, and the look goes on.

    Attributes:
      folder: of the step.
      leaves: the arrays that can be opened.
    """

    def __init__(self, folder: epath.Path) -> None:
        self.folder = folder
        self._record: Record | None = None
        self._arrays: Arrays | None = None
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._bytes = 0
        self.leaves: list[Leaf] = []
        with self._noted():
            self._bytes = sum(size for _, size in records.sizes(folder))
        with self._noted():
            self._record = records.read(folder)
        if self._record:
            self._problems += records.changed(folder, self._record)
        with self._noted():
            self._arrays = Arrays(folder)
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

    def _read(self, leaf: Leaf) -> Iterator[int]:
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

    def found(self, quick: bool) -> Step:
        """All that is known now."""
        record = self._record
        form = record.form if record else _form(self.leaves)
        whole: Status = "files whole" if quick else "whole"
        named = int(self.folder.name) if self.folder.name.isdecimal() else None
        return Step(
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


def _alike(leaf: Leaf, recorded: LeafRecord) -> bool:
    if recorded.dtype.startswith("key<"):  # on disk its data is
        return leaf.shape[: len(recorded.shape)] == recorded.shape and leaf.dtype == "uint32"
    return leaf.shape == recorded.shape and str(leaf.dtype) == recorded.dtype


def _array(leaf: Leaf, form: Form | None, record: Record | None) -> Array:
    recorded = record.leaves.get(leaf.name) if record else None
    group = "other state"
    for prefixes, called in ((PARAMS, "parameters"), (OPTIMIZER, "optimizer state")):
        if form and leaf.path[: len(prefixes[form])] == prefixes[form]:
            group = called
    return Array(
        name=leaf.name,
        shape=recorded.shape if recorded else leaf.shape,
        dtype=recorded.dtype if recorded else str(leaf.dtype),
        spec=recorded.spec if recorded else None,
        bytes=leaf.bytes,
        group=group,
    )


def _form(leaves: list[Leaf]) -> Form | None:
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
