"""Random access to the elements of tensors in safetensors files.

Example::

    with open_tensors("gpt2") as tensors:                # a folder or a file; reads only headers
        tensors["wte.weight"].shape                      # (50257, 768)
        tensors["wte.weight"].read(np.empty((8, 768), np.float32))

Files are read, not memory-mapped, so that the process holds only the requested elements. The
format: https://huggingface.co/docs/safetensors; several files with an index that maps tensors to
files: https://huggingface.co/docs/transformers/big_models.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from zerojax.config.errors import as_text
from zerojax.weights.cast import cast
from zerojax.weights.strides import bands, contiguous, runs, start
from zerojax.weights.writer import DTYPES, INDEX, SINGLE, Path

_NUMPY = {theirs: ours for ours, theirs in DTYPES.items()}


class FileTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      name: Its name.
      file, opened: The file's path and its open file descriptor.
      shape: The tensor's shape.
      stored: The safetensors name of its dtype, such as "F32".
      begin: The byte offset in the file at which the tensor begins.
    """

    name: str
    file: pathlib.Path
    opened: int
    shape: tuple[int, ...]
    stored: str
    begin: int

    @property
    def dtype(self) -> np.dtype | None:
        """The NumPy dtype; None if NumPy has no such dtype."""
        return jnp.dtype(_NUMPY[self.stored]) if self.stored in _NUMPY else None

    def read(
        self, out: np.ndarray, offset: int = 0, strides: Sequence[int] | None = None
    ) -> np.ndarray:
        """Fills ``out`` with elements of the tensor, cast to the dtype of ``out``.

        Args:
          out: The array to fill, with any strides.
          offset: The offset of the first element in the tensor, in elements.
          strides: The strides of ``out``'s dimensions in the tensor, in elements; by default the
            elements are contiguous.

        Returns:
          ``out``.

        Raises:
          ValueError: The file became shorter, or a value is beyond the range of ``out``'s dtype.
        """
        dtype = self.dtype
        assert dtype is not None, self.stored
        strides = contiguous(out.shape) if strides is None else strides
        for band in bands(out.shape, dtype.itemsize) if out.size else ():
            index: tuple[slice | EllipsisType, ...] = (*band, ...)
            block = out[index]
            is_direct = block.dtype == dtype and block.flags.c_contiguous
            data = block if is_direct else np.empty(block.shape, dtype)
            length, offsets = runs(block.shape, strides)
            offsets = self.begin + dtype.itemsize * (offsets + offset + start(band, strides))
            rows, step = memoryview(data.reshape(-1).view(np.uint8)), length * dtype.itemsize
            for i, position in enumerate(offsets.tolist()):
                self._fill(rows[i * step : (i + 1) * step], position)
            if not is_direct:
                block[...] = cast(data, out.dtype, f"{self.file}: {self.name}")
        return out

    def _fill(self, row: memoryview, at: int) -> None:
        while row:
            count = os.preadv(self.opened, [row], at)
            if not count:
                raise ValueError(f"{self.file} became shorter while it was read: copy it again")
            row, at = row[count:], at + count


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, FileTensor]]:
    """Opens the tensors of a file or folder, by name; they are readable while the context is open.

    A folder has ``model.safetensors``, or ``model.safetensors.index.json`` and the files it names.

    Raises:
      FileNotFoundError: The path, or a file that the index names, does not exist.
      ValueError: A file is truncated or not in the safetensors format, the index names a file
        outside of the folder, or the index and its files disagree.
    """
    path = pathlib.Path(path)
    with contextlib.ExitStack() as stack:
        if path.is_dir() and not (path / SINGLE).exists():
            yield _open_indexed(path, stack)
        else:
            yield _open_file(path / SINGLE if path.is_dir() else path, stack)


def _open_indexed(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for name, indexed in _files_of(folder).items():
        file = _in_folder(folder, name)
        found = _open_file(file, stack)
        if mismatched := indexed ^ found.keys():
            raise ValueError(
                f"{folder / INDEX} and {file.name} disagree on {_named(min(mismatched))} "
                f"({len(mismatched)} such tensors): copy index and files of one save"
            )
        tensors |= found
    return tensors


def _files_of(folder: pathlib.Path) -> dict[str, set[str]]:
    """Returns the tensors that the index assigns to each file."""
    index = folder / INDEX
    if not index.is_file():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}: pass a folder with one of them, or a "
            "file. Convert other formats (pytorch_model.bin) with transformers' save_pretrained"
        )
    try:
        weight_map = read_json(index).get("weight_map")
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from None
    if not (isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values())):
        raise ValueError(f"{index}: no weight_map of tensor names to file names; copy it again")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        files.setdefault(file, set()).add(name)
    return files


def _in_folder(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a file that the index names; a link, as in Hugging Face's cache, is fine.

    Raises:
      FileNotFoundError: The file is not in the folder.
      ValueError: The name leads out of the folder.
    """
    path, index = pathlib.PurePath(name), folder / INDEX
    if not path.name or path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{index} names {_named(name)}, outside of the folder: copy index and files of one save"
        )
    if not os.path.isfile(folder / path):  # False for a name that is too long
        raise FileNotFoundError(f"{index} names {_named(name)}, which is not there: copy it")
    return folder / path


def _open_file(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, FileTensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass a safetensors file or its folder")
    file = stack.enter_context(path.open("rb", buffering=0))
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # the library checks that tensors fill the file as the header says
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file "
            f"({error!s:.400}): copy it again (`git lfs pull` in a git repository)"
        ) from None
    header.pop("__metadata__", None)
    return {
        name: FileTensor(
            *(name, path, file.fileno(), tuple(about["shape"]), about["dtype"]),
            8 + length + about["data_offsets"][0],
        )
        for name, about in header.items()
    }


def read_json(file: pathlib.Path) -> dict[str, object]:
    """Reads a JSON object.

    Raises:
      ValueError: The file is not a JSON object.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}): copy the file again") from None
    if not isinstance(values, dict):
        raise ValueError(f"not JSON ({type(values).__name__} for an object): copy the file again")
    return values


def _named(name: str) -> str:
    """Returns a name for messages: unchanged if printable and short, else quoted and shortened."""
    return name if name.isprintable() and 0 < len(name) <= 80 else as_text(name)
