"""A writer of safetensors files that accepts blocks of tensors in any order.

The format: https://huggingface.co/docs/safetensors; several files with an index of their tensors:
https://huggingface.co/docs/transformers/big_models. The safetensors library needs every tensor of
a file in memory at once to write it, so it only checks the files that this module writes.

>>> with tempfile.TemporaryDirectory() as folder:
...     tensor = TensorSpec("wte.weight", (2, 3), np.dtype("float32"))
...     with writing(folder, [tensor], max_bytes=10**9) as put:
...         put("wte.weight", np.ones((1, 3), np.float32), offset=3)
...         put("wte.weight", np.zeros((1, 3), np.float32))
...     os.listdir(folder)
['model.safetensors']
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple, Protocol

import numpy as np
import safetensors

from zerojax.weights.strides import bands, contiguous, runs, start

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The dtypes of tensors: safetensors' names by NumPy's names."""

_FILES = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|" + re.escape(INDEX))

Path = str | os.PathLike[str]


class TensorSpec(NamedTuple):
    """The name, shape and dtype of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class BlockWriter(Protocol):
    """A function that writes a block of a tensor.

    ``offset`` is the offset of the first element in the tensor, and ``strides`` are the strides of
    the block's dimensions in the tensor, both in elements; by default the elements are contiguous.
    """

    def __call__(
        self, name: str, block: np.ndarray, offset: int = 0, strides: Sequence[int] | None = None
    ) -> None: ...


@contextlib.contextmanager
def writing(
    folder: Path,
    tensors: Sequence[TensorSpec],
    *,
    max_bytes: int,
    texts: Mapping[str, str] | None = None,
) -> Iterator[BlockWriter]:
    """Writes tensors as ``model.safetensors``, or as several files and an index.

    The context's value is a :class:`BlockWriter`, which does not keep the blocks that it writes.
    Files have temporary names and are moved into place at the end, so that an error leaves the
    folder unchanged. Then files of an earlier save, which a reader might mistake for these tensors,
    are removed.

    Args:
      folder: The folder to write, created if it does not exist.
      tensors: All tensors; files hold them in the order of their names, ``h.2`` before ``h.10``.
      max_bytes: The largest size of a file. A larger tensor gets a separate file.
      texts: The contents of other files in the folder, by name.

    Raises:
      ValueError: ``max_bytes`` is not a positive int, or a tensor is incomplete at the end.
      OSError: the files cannot be written.
    """
    groups = _grouped(sorted(tensors, key=_in_order), max_bytes)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    texts = dict(texts or {})
    if len(groups) == 1:
        names = [SINGLE]
    else:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {
                x.name: n for n, group in zip(names, groups, strict=True) for x in group
            },
        }
        texts[INDEX] = json.dumps(index, indent=2) + "\n"
    folder = pathlib.Path(folder)
    with (
        _created_folder(folder),
        tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary,
    ):
        staging = pathlib.Path(temporary)
        files = _Files(dict(zip([staging / name for name in names], groups, strict=True)))
        yield files.put
        files.finish()
        for name in names:
            with safetensors.safe_open(staging / name, framework="numpy"):
                pass  # opening a file checks its header and size
        for name, text in texts.items():
            (staging / name).write_text(text, encoding="utf-8")
        for name in [*names, *texts]:
            os.replace(staging / name, folder / name)
    for file in folder.iterdir():
        if _FILES.fullmatch(file.name) and file.name not in (*names, *texts):
            file.unlink()


class _Place(NamedTuple):
    """A tensor's file, and its offset in that file in bytes."""

    file: pathlib.Path
    offset: int
    tensor: TensorSpec


class _Files:
    """Files with headers, preallocated at their final size."""

    def __init__(self, groups: Mapping[pathlib.Path, Sequence[TensorSpec]]) -> None:
        self._groups = groups
        self._places: dict[str, _Place] = {}
        self._missing: dict[str, int] = {}
        for path, group in groups.items():
            # Wide dtypes first, so that each tensor starts at a multiple of its item size.
            group = sorted(group, key=lambda tensor: -tensor.dtype.itemsize)
            ends = [0, *itertools.accumulate(tensor.nbytes for tensor in group)]
            header = _header(group, ends)
            with path.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + ends[-1])
            for tensor, begin in zip(group, ends, strict=False):
                self._places[tensor.name] = _Place(path, len(header) + begin, tensor)
                self._missing[tensor.name] = tensor.nbytes

    def put(
        self, name: str, block: np.ndarray, offset: int = 0, strides: Sequence[int] | None = None
    ) -> None:
        """Writes a block; see :class:`BlockWriter`."""
        path, begin, (_, shape, dtype) = self._places[name]
        assert block.dtype == dtype, (name, block.dtype, dtype)
        if not block.size:
            return
        strides = contiguous(block.shape) if strides is None else strides
        with path.open("r+b", buffering=0) as file:
            for band in bands(block.shape, dtype.itemsize):
                index: tuple[slice | EllipsisType, ...] = (*band, ...)
                values = np.ascontiguousarray(block[index]).reshape(block[index].shape)
                length, offsets = runs(values.shape, strides)
                offsets = offsets + offset + start(band, strides)
                assert 0 <= offsets[0] <= offsets[-1] + length <= math.prod(shape), (name, offset)
                rows, step = memoryview(values.reshape(-1).view(np.uint8)), length * dtype.itemsize
                for i, position in enumerate((begin + offsets * dtype.itemsize).tolist()):
                    _write(file.fileno(), rows[i * step : (i + 1) * step], position)
        self._missing[name] -= block.nbytes

    def finish(self) -> None:
        """Checks that every tensor is complete, and syncs the files to the disk."""
        if missing := {name: n for name, n in self._missing.items() if n}:
            name, n = next(iter(missing.items()))
            raise ValueError(f"{name}: {n} bytes were not written ({len(missing)} such tensors)")
        for path in self._groups:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _write(file: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written


@contextlib.contextmanager
def _created_folder(folder: pathlib.Path) -> Iterator[None]:
    """Creates a folder and its parents; an error within the context removes the new ones."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in created:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def _header(tensors: Sequence[TensorSpec], ends: Sequence[int]) -> bytes:
    # transformers refuses a file without "format" in its metadata.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, offsets in zip(tensors, itertools.pairwise(ends), strict=True):
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype.name],
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _grouped(tensors: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"a file's size must be a positive int in bytes, not {max_bytes!r}")
    groups: list[list[TensorSpec]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups


def _in_order(tensor: TensorSpec) -> list[tuple[int, str]]:
    return [(int(x), "") if x.isdecimal() else (-1, x) for x in tensor.name.split(".")]
