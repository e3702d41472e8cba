"""A saved step: its folder, its record, and any slice of any of its arrays, without a device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore
from etils import epath

from zerojax.checkpoint import record as records
from zerojax.checkpoint import steps_folder
from zerojax.checkpoint.errors import (
    UNREADABLE,
    CheckpointError,
    DamagedCheckpointError,
    reading,
    together,
)
from zerojax.checkpoint.record import LeafRecord, Record
from zerojax.offload.disk.slices import grid, results
from zerojax.xla.types import PyTree

STATE = "state"
ITEMS = (STATE, "default", "pytree", "")
"""Folders within a step that may hold orbax's tree: of zerojax and orbax v1, of orbax's manager, of
an older v1; or the step's folder itself."""

_METADATA = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_BLOCK_BYTES = 4 * 2**20
_INDEX = "cache_pool#index"
"""Tensorstore's cache for ocdbt's index, which would otherwise be re-read for every array."""


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
      folder: The step's folder.
      item: The folder of orbax's tree.
      names: Orbax's names of the arrays, sorted.
      recorded: Whether zerojax wrote the step, so that a record must exist.

    Raises:
      DamagedCheckpointError: the step has no arrays, or orbax's metadata cannot be read.
      CheckpointError: the operating system refuses to read the step's files.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        self.folder: epath.Path = steps_folder.path_of(folder)
        self._context = tensorstore.Context({_INDEX: {"total_bytes_limit": 64 * 2**20}})
        with reading(self.folder, (OSError,)):
            item = item_of(self.folder)
            if not steps_folder.in_bucket(self.folder):
                for _ in records.sizes(item or self.folder):  # a FIFO would block tensorstore
                    pass
            listing = "" if item else contents(self.folder)
        if item is None:
            raise DamagedCheckpointError(f"{self.folder} holds no arrays ({STATE}): {listing}")
        self.item = item
        with reading(item / _METADATA):
            metadata = json.loads(steps_folder.read(item / _METADATA).decode())
            self._driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
            ocdbt = metadata.get("use_ocdbt")
            self._ocdbt = bool((item / _MANIFEST).exists() if ocdbt is None else ocdbt)
            # If chunks of zeros are stored too, a missing chunk was lost.
            self._filled = bool(metadata.get("store_array_data_equal_to_fill_value"))
            self.recorded: bool = metadata.get("custom_metadata") == records.MARK
            paths = [
                tuple(str(key["key"]) for key in entry["key_metadata"])
                for entry in metadata["tree_metadata"].values()
                if not entry["value_metadata"].get("skip_deserialize")
            ]
            if outside := [path for path in paths if ".." in "/".join(path).split("/")]:
                raise ValueError(f"an array's name leaves the folder: {outside[0]!r:.200}")
        self._paths = {".".join(path): path for path in paths}
        self.names: list[str] = sorted(self._paths)

    def array(self, name: str) -> SavedArray:
        """Returns the path, shape and dtype of an array.

        Raises:
          DamagedCheckpointError: the array cannot be opened.
        """
        return self._array(name, self._begin(name))

    def _array(self, name: str, opening: tensorstore.Future[tensorstore.TensorStore]) -> SavedArray:
        with self._reading(name):
            store = opening.result()
        return SavedArray(self._paths[name], name, tuple(store.shape), store.dtype.numpy_dtype)

    def arrays(self) -> Iterator[SavedArray]:
        """Returns an iterator over every array, sorted by name."""
        opening = [self._begin(name) for name in self.names]
        return map(self._array, self.names, opening)

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        """Reads the elements of an array at an index.

        Raises:
          DamagedCheckpointError: the elements cannot be read.
        """
        with self._reading(name):
            return np.asarray(self._open(name)[index].read().result())

    def blocks(
        self, name: str, most: int = _BLOCK_BYTES
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yields blocks of an array, each with the index of its first element.

        A block has at most ``most`` bytes, or is one chunk on disk if a larger chunk is compressed.
        Two blocks are in memory at a time.

        Raises:
          DamagedCheckpointError: a block cannot be read.
        """
        store = self._open(name)
        is_uncompressed = (
            self._driver == "zarr" and not store.spec().to_json()["metadata"]["compressor"]
        )
        chunk = () if is_uncompressed else store.chunk_layout.read_chunk.shape
        sizes = block_shape(store.shape, store.dtype.numpy_dtype.itemsize, most, chunk)
        boxes = [*grid(store.shape, sizes)]
        reads = (lambda box=box: store[box].read() for box in boxes)
        with self._reading(name):
            for box, values in zip(boxes, results(reads, 2), strict=True):
                yield tuple(s.start for s in box), values

    def _open(self, name: str) -> Any:
        with self._reading(name):
            return self._begin(name).result()

    def _begin(self, name: str) -> tensorstore.Future[tensorstore.TensorStore]:
        kvstore: dict[str, Any] = steps_folder.kvstore(self.item)
        if self._ocdbt:
            kvstore = {"driver": "ocdbt", "base": kvstore, "path": f"{name}/", "cache_pool": _INDEX}
        else:
            kvstore["path"] += f"{name}/"
        spec = {
            "driver": self._driver,
            "kvstore": kvstore,
            "fill_missing_data_reads": not self._filled,
        }
        with self._reading(name):
            return tensorstore.open(spec, open=True, read=True, context=self._context)

    def _reading(self, name: str) -> AbstractContextManager[None]:
        return reading(f"{self.item}: {name:.200}", (*UNREADABLE, NotImplementedError))


class SavedStep(SavedArrays):
    """A step of zerojax or plain orbax, whose files were checked against the record, if any.

    Attributes:
      record: The record that zerojax wrote; None if plain orbax wrote the step.

    Raises:
      CheckpointError: a newer zerojax wrote the step.
      DamagedCheckpointError: the step has no arrays, the record is missing or cannot be read, or
        files differ from the record.
    """

    def __init__(self, folder: epath.PathLike) -> None:
        root = steps_folder.path_of(folder)
        self.record: Record | None = records.read(root)
        if self.record and (problems := records.find_changes(root, self.record)):
            raise together(problems)
        super().__init__(root)
        if differences := unlike(self, self.record):
            raise DamagedCheckpointError("\n".join(differences))

    def extra(self, process: int | None) -> PyTree:
        """Returns the ``extra`` of a save; None for a step of plain orbax.

        Args:
          process: The process that saved it, if each process saved a different ``extra``; None for
            process 0.

        Raises:
          CheckpointError: ``process`` is not one of the processes that saved the step.
          DamagedCheckpointError: the ``extra`` cannot be read.
        """
        with reading(f"{self.folder}: extra"):
            return records.decode_json(self._extra(process))

    def _extra(self, process: int | None) -> object:
        """Returns the ``extra`` as JSON, see :meth:`extra`."""
        if self.record is None:
            return None
        if process is None or not self.extra_by_process:
            return self.record.extra
        if not 0 <= process < self.record.processes:
            raise CheckpointError(
                f"{self.folder} has extras of {self.record.processes} processes, not of {process}"
            )
        return json.loads(steps_folder.read(records.extra_file(self.folder, process)).decode())

    def require_processes(self, count: int) -> None:
        """Checks that ``count`` processes saved the step, if each saved a separate ``extra``.

        Raises:
          CheckpointError: more or fewer processes saved the step.
        """
        if self.record is None or not self.extra_by_process or count == self.record.processes:
            return
        processes = self.record.processes
        raise CheckpointError(
            f"{self.folder}: {processes} processes each saved an extra, and {count} restore: read "
            "them by extra(process=...), and divide them"
        )

    @property
    def extra_by_process(self) -> bool:
        """True if each process saved a separate ``extra``."""
        files = self.record.files if self.record else ()
        return any(name.startswith(f"{records.EXTRA}/") for name in files)


def unlike(arrays: SavedArrays, record: Record | None) -> list[str]:
    """Returns the differences between the record and orbax's list of arrays, one line each."""
    if record is None:
        file = arrays.folder / records.FILE
        return [f"{file} is missing"] if arrays.recorded and not file.exists() else []
    missing = [f"{name} is missing" for name in record.leaves if name not in arrays.names]
    surplus = [f"{name} was not saved" for name in arrays.names if name not in record.leaves]
    return [f"{arrays.item}: {problem}" for problem in missing + surplus]


def require_complete(folder: epath.Path) -> None:
    """Checks that a newly written step has its record and all arrays that the record lists.

    Raises:
      DamagedCheckpointError: the record or an array is missing, or an array has another shape or
        dtype.
    """
    record, arrays = records.read(folder), SavedArrays(folder)
    differences = unlike(arrays, record)
    if record and not differences:
        pairs = ((array, record.leaves[array.name]) for array in arrays.arrays())
        differences = [f"{arrays.item}: {differs(*pair)}" for pair in pairs if not alike(*pair)]
    if differences:
        raise DamagedCheckpointError("\n".join(differences))


def alike(array: SavedArray, recorded: LeafRecord) -> bool:
    """Returns whether a saved array has the recorded shape and dtype."""
    if recorded.dtype.startswith("key<"):  # the disk holds the key's data
        return array.shape[: len(recorded.shape)] == recorded.shape and array.dtype == "uint32"
    return array.shape == recorded.shape and str(array.dtype) == recorded.dtype


def differs(array: SavedArray, recorded: LeafRecord) -> str:
    """Describes, for messages, a saved array that is not :func:`alike`."""
    return (
        f"{array.name} is {array.dtype}{[*array.shape]}, saved was "
        f"{recorded.dtype}{[*recorded.shape]}"
    )


def at(checkpoint: epath.PathLike, step: int | None = None) -> list[epath.Path]:
    """Returns the folders of the steps at a path, in order: the path itself, or its steps.

    Args:
      checkpoint: A step's folder, or a folder of steps.
      step: The only step to return; all by default.

    Raises:
      CheckpointError: the path does not exist, holds no checkpoint, or lacks the step.
    """
    root = steps_folder.require_answer(steps_folder.path_of(checkpoint))
    with reading(root, (OSError,)):
        return _at(root, step)


def _at(root: epath.Path, step: int | None) -> list[epath.Path]:
    if not steps_folder.exists(root):
        raise CheckpointError(f"{root} does not exist: check the path; the first save creates it")
    if root.name == STATE and (root.parent / records.FILE).exists():
        root = root.parent
    if step is None and root.is_dir() and (item_of(root) or (root / records.FILE).exists()):
        return [root]
    by_step = steps_folder.folders(root)
    if not by_step:
        raise CheckpointError(
            f"{root} holds no checkpoint ({contents(root)}): check the path, or save first"
        )
    if step is not None and step not in by_step:
        raise CheckpointError(f"{root} has no step {step}; it has {', '.join(map(str, by_step))}")
    return [folder for n, folder in by_step.items() if step in (None, n)]


def find(checkpoint: epath.PathLike, step: int | None = None) -> SavedStep:
    """Opens the step at a path: a step's folder, or a folder of steps; the newest by default.

    Raises:
      CheckpointError: see :func:`at`.
      DamagedCheckpointError: see :class:`SavedStep`.
    """
    return SavedStep(at(checkpoint, step)[-1])


def item_of(folder: epath.Path) -> epath.Path | None:
    """Returns the folder of orbax's tree in a step's folder; None if none exists.

    Raises:
      OSError: The operating system refuses access.
    """
    for name in ITEMS:
        if steps_folder.exists(folder / name / _METADATA):
            return folder / name
    for other in sorted(folder.iterdir()) if folder.is_dir() else ():
        if steps_folder.number(other.name) is None and steps_folder.exists(other / _METADATA):
            return other
    return None


def contents(folder: epath.Path) -> str:
    """Describes, for messages, the contents of a folder that is not a checkpoint."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    names = sorted(x.name for x in folder.iterdir() if x.name[0] != ".")
    if not names:
        return "it is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"


def block_shape(
    shape: Sequence[int], itemsize: int, most: int, chunk: Sequence[int] = ()
) -> list[int]:
    """Returns the shape of a block of at most ``most`` bytes that is contiguous in an array.

    Args:
      shape: The shape of the array.
      itemsize: The bytes of an element.
      most: The maximum bytes of the block; a chunk may be larger.
      chunk: The shape of chunks of which the block must consist; empty for elements.
    """
    sizes = [max(1, min(n, c)) for n, c in zip(shape, chunk or (1,) * len(shape), strict=True)]
    for d in reversed(range(len(shape))):
        room = most // (math.prod(sizes) * itemsize)
        sizes[d] = max(1, min(shape[d], sizes[d] * max(1, room)))
    return sizes
