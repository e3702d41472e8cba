"""A saved step: its folder, its record, and any slice of any of its arrays, without a device."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError, reason
from zerojax.checkpoint.record import Record

STATE = "state"
ITEMS = (STATE, "default", "pytree", "")
"""Where orbax keeps a tree: as we and v1 do, the manager, an older v1, and the folder itself."""

_METADATA = "_METADATA"
_STEP = re.compile(r"\d+")
_BLOCK_BYTES = 4 * 2**20
_INDEX = "cache_pool#index"
"""Where ocdbt's index is kept, so that it is not read anew for every array."""


@dataclass(frozen=True)
class SavedArray:
    """An array on disk: ``path`` is its keys from the root, ``name`` orbax's name of it."""

    path: tuple[str, ...]
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SavedArrays:
    """The arrays of the step in ``folder``.

    Attributes:
      folder: of the step.
      item: the folder of its tree.
      names: of the arrays, as orbax has them, sorted.
      recorded: zerojax wrote it, so that there has to be a record.

    Raises:
      DamagedCheckpointError: it has none, or what orbax says of them cannot be read.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        self.folder = epath.Path(folder)
        self._context = tensorstore.Context({_INDEX: {"total_bytes_limit": 64 * 2**20}})
        item = item_of(self.folder)
        if item is None:
            raise DamagedCheckpointError(
                f"{self.folder} holds no arrays ({STATE}/{_METADATA} or the like): "
                f"{contents(self.folder)}"
            )
        self.item = item
        try:
            about = json.loads((item / _METADATA).read_text())
            self._driver = "zarr3" if about.get("use_zarr3") else "zarr"
            self._ocdbt = bool(about.get("use_ocdbt", (item / "manifest.ocdbt").exists()))
            # Chunks of zeros are there too: one that is not was lost.
            self._filled = bool(about.get("store_array_data_equal_to_fill_value"))
            self.recorded = about.get("custom_metadata") == records.MARK
            paths = [
                tuple(str(key["key"]) for key in entry["key_metadata"])
                for entry in about["tree_metadata"].values()
                if not entry["value_metadata"].get("skip_deserialize")
            ]
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise DamagedCheckpointError(
                f"{item / _METADATA} cannot be read: {type(error).__name__}: {error}"
            ) from None
        self._paths = {".".join(path): path for path in paths}
        self.names = sorted(self._paths)

    def leaf(self, name: str) -> SavedArray:
        """What is known of one array."""
        return self._leaf(name, self._begin(name))

    def _leaf(self, name: str, opening: Any) -> SavedArray:
        store = self._result(name, opening)
        return SavedArray(self._paths[name], name, tuple(store.shape), store.dtype.numpy_dtype)

    def leaves(self) -> Iterator[SavedArray]:
        """Every array, in the order of their names."""
        opening = [self._begin(name) for name in self.names]
        return map(self._leaf, self.names, opening)

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """A slice of an array, as ``index`` has it."""
        return self._result(name, self._open(name)[index].read())

    def blocks(self, name: str) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """An array piece by piece, each with the index at which it begins.

        A piece is of 4 MB at most, or one chunk on disk where that is larger and compressed; two
        are in memory.
        """
        store = self._open(name)
        plain = self._driver == "zarr" and not store.spec().to_json()["metadata"]["compressor"]
        chunk = None if plain else store.chunk_layout.read_chunk.shape
        sizes = _block(store.shape, chunk, store.dtype.numpy_dtype)
        steps = [range(0, n, size) for n, size in zip(store.shape, sizes, strict=True)]
        ahead = None
        for start in itertools.product(*steps):
            index = tuple(slice(i, i + n) for i, n in zip(start, sizes, strict=True))
            here, ahead = ahead, (start, store[tuple(map(_within, index, store.shape))].read())
            if here:
                yield here[0], self._result(name, here[1])
        if ahead:
            yield ahead[0], self._result(name, ahead[1])

    def _open(self, name: str) -> Any:
        return self._result(name, self._begin(name))

    def _begin(self, name: str) -> Any:
        # Mapped into memory, an uncompressed chunk costs no more than the part that is read.
        mapped = {"mode": "memmap"}
        kvstore: Any = {"driver": "file", "path": f"{self.item}/", "file_io_mode": mapped}
        if self._ocdbt:
            kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{name}/", "cache_pool": _INDEX}
        else:
            kvstore["path"] += f"{name}/"
        spec = {
            "driver": self._driver,
            "kvstore": kvstore,
            "fill_missing_data_reads": not self._filled,
        }
        return tensorstore.open(spec, open=True, read=True, context=self._context)

    def _result(self, name: str, future: Any) -> Any:
        try:
            return future.result()
        except ValueError as error:
            raise DamagedCheckpointError(
                f"{self.item}: {name} cannot be read: {reason(error)}"
            ) from None


class SavedStep(SavedArrays):
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


def unlike(arrays: SavedArrays, record: Record | None) -> list[str]:
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


def find(checkpoint: epath.PathLike, step: int | None = None) -> SavedStep:
    """The step at a path: a step's folder, or a folder of steps, of which the newest by default.

    Raises:
      CheckpointError: see :func:`at`.
      DamagedCheckpointError: see :class:`SavedStep`.
    """
    return SavedStep(at(checkpoint, step)[-1])


def item_of(folder: epath.Path) -> epath.Path | None:
    """The folder of the tree in a step's folder; None where there is none."""
    known = (folder / n for n in ITEMS if (folder / n / _METADATA).exists())
    named = (file.parent for file in sorted(folder.glob(f"*/{_METADATA}")))
    return next(known, next(named, None))


def contents(folder: epath.Path) -> str:
    """For messages: what a folder holds instead of what was expected."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"


def _block(shape: tuple[int, ...], chunk: tuple[int, ...] | None, dtype: np.dtype) -> list[int]:
    """How much of each dimension to read at once: whole chunks, where a chunk is given."""
    sizes = [max(1, min(n, c or 1)) for n, c in zip(shape, chunk or (1,) * len(shape), strict=True)]
    for d in reversed(range(len(shape))):
        room = _BLOCK_BYTES // (math.prod(sizes) * dtype.itemsize)
        sizes[d] = max(1, min(shape[d], sizes[d] * max(1, room)))
    return sizes


def _within(index: slice, n: int) -> slice:
    """tensorstore takes no slice beyond the end."""
    return slice(index.start, min(index.stop, n))
