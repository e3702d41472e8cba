"""A saved step: its folder, its record, and any slice of any of its arrays, without a device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import steps_folder
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError, reason
from zerojax.checkpoint.record import Record
from zerojax.offload.disk.pieces import grid

STATE = "state"
ITEMS = (STATE, "default", "pytree", "")
"""Where orbax keeps a tree: zerojax and v1, the manager, an older v1, the step's folder itself."""

_METADATA = "_METADATA"
_BLOCK_BYTES = 4 * 2**20
_INDEX = "cache_pool#index"
"""The cache of ocdbt's index, which would be read anew for every array."""


@dataclass(frozen=True)
class SavedArray:
    """An array on disk: ``path`` is its keys from the root, ``name`` its name in orbax."""

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
      folder: Of the step.
      item: The folder of orbax's tree.
      names: Orbax's names of the arrays, sorted.
      recorded: Whether zerojax wrote the step, so that a record must exist.

    Raises:
      DamagedCheckpointError: the step has no arrays, or orbax's metadata cannot be read.
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
            # Chunks of zeros are stored too: a missing chunk was lost.
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

    def array(self, name: str) -> SavedArray:
        """Path, shape and dtype of an array.

        Raises:
          DamagedCheckpointError: the array cannot be opened.
        """
        return self._array(name, self._begin(name))

    def _array(self, name: str, opening: Any) -> SavedArray:
        store = self._result(name, opening)
        return SavedArray(self._paths[name], name, tuple(store.shape), store.dtype.numpy_dtype)

    def arrays(self) -> Iterator[SavedArray]:
        """Every array, sorted by name."""
        opening = [self._begin(name) for name in self.names]
        return map(self._array, self.names, opening)

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """The elements of an array at an index.

        Raises:
          DamagedCheckpointError: they cannot be read.
        """
        return self._result(name, self._open(name)[index].read())

    def blocks(self, name: str) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Blocks of an array, each with the index of its first element.

        A block has 4 MB at most, or is one chunk on disk where a larger one is compressed. Two
        blocks are in memory at a time.

        Raises:
          DamagedCheckpointError: a block cannot be read.
        """
        store = self._open(name)
        plain = self._driver == "zarr" and not store.spec().to_json()["metadata"]["compressor"]
        chunk = None if plain else store.chunk_layout.read_chunk.shape
        sizes = _block(store.shape, chunk, store.dtype.numpy_dtype)
        ahead = None
        for box in grid(store.shape, sizes):
            now, ahead = ahead, (tuple(s.start for s in box), store[box].read())
            if now:
                yield now[0], self._result(name, now[1])
        if ahead:
            yield ahead[0], self._result(name, ahead[1])

    def _open(self, name: str) -> Any:
        return self._result(name, self._begin(name))

    def _begin(self, name: str) -> Any:
        kvstore: Any = steps_folder.kvstore(self.item)
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
    """A step whose files are those that were written, by zerojax or by plain orbax.

    Attributes:
      record: Zerojax's; None where plain orbax wrote the step.

    Raises:
      CheckpointError: a newer zerojax wrote it.
      DamagedCheckpointError: the step has no arrays, the record is missing or cannot be read, or
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
    """Differences between the record and orbax's own list of the arrays, one line each."""
    if record is None:
        file = arrays.folder / records.FILE
        return [f"{file} is missing"] if arrays.recorded and not file.exists() else []
    lost = [f"{name} is missing" for name in record.leaves if name not in arrays.names]
    new = [f"{name} was not saved" for name in arrays.names if name not in record.leaves]
    return [f"{arrays.item}: {problem}" for problem in lost + new]


def at(checkpoint: epath.PathLike, step: int | None = None) -> list[epath.Path]:
    """The folders of the steps at a path, in order: the path itself, or its steps.

    Args:
      checkpoint: A step's folder, or a folder of steps.
      step: Only this step.

    Raises:
      CheckpointError: the path does not exist, holds no checkpoint, or has no such step.
    """
    root = epath.Path(checkpoint)
    if not root.exists():
        raise CheckpointError(f"{root} does not exist")
    if root.name == STATE and (root.parent / records.FILE).exists():
        root = root.parent
    if step is None and root.is_dir() and (item_of(root) or (root / records.FILE).exists()):
        return [root]
    by_step = steps_folder.folders(root)
    if not by_step:
        raise CheckpointError(
            f"{root} holds no checkpoint: {contents(root)}; expected folders named by step, as 100/"
        )
    if step is not None and step not in by_step:
        raise CheckpointError(f"{root} has no step {step}; it has {', '.join(map(str, by_step))}")
    return [folder for n, folder in by_step.items() if step in (None, n)]


def find(checkpoint: epath.PathLike, step: int | None = None) -> SavedStep:
    """The step at a path: a step's folder, or a folder of steps; the newest by default.

    Raises:
      CheckpointError: see :func:`at`.
      DamagedCheckpointError: see :class:`SavedStep`.
    """
    return SavedStep(at(checkpoint, step)[-1])


def item_of(folder: epath.Path) -> epath.Path | None:
    """The folder of orbax's tree in a step's folder; None where none exists."""
    known = (folder / n for n in ITEMS if (folder / n / _METADATA).exists())
    named = (file.parent for file in sorted(folder.glob(f"*/{_METADATA}")))
    return next(known, next(named, None))


def contents(folder: epath.Path) -> str:
    """For messages: the contents of a folder that is no checkpoint."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"


def _block(shape: tuple[int, ...], chunk: tuple[int, ...] | None, dtype: np.dtype) -> list[int]:
    """The shape of a block to read: whole chunks, where a chunk is given."""
    sizes = [max(1, min(n, c or 1)) for n, c in zip(shape, chunk or (1,) * len(shape), strict=True)]
    for d in reversed(range(len(shape))):
        room = _BLOCK_BYTES // (math.prod(sizes) * dtype.itemsize)
        sizes[d] = max(1, min(shape[d], sizes[d] * max(1, room)))
    return sizes
