"""The tensors of safetensors files, of which any elements are read by themselves.

Example::

    with open_tensors("gpt2") as tensors:                # a folder or a file; headers alone
        tensors["wte.weight"].shape                      # (50257, 768)
        tensors["wte.weight"].read(np.empty((8, 768), np.float32))

A file is read, not mapped, so that the process holds no more of it than what was asked for. The
format: https://huggingface.co/docs/safetensors; several files with an index that says which tensor
is where: https://huggingface.co/docs/transformers/big_models.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.weights.cast import cast
from zerojax.weights.strides import bands, contiguous, runs, start
from zerojax.weights.writer import DTYPES, INDEX, SINGLE, Path

_LONGEST_HEADER = 100 * 2**20
_NUMPY = {theirs: ours for ours, theirs in DTYPES.items()}


class FileTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      name: Its name.
      file: The file, and ``opened`` the number under which it is open.
      shape: The tensor's shape.
      stored: Its dtype in safetensors' words, "F32".
      begin: The byte of the file at which the tensor begins.
    """

    name: str
    file: pathlib.Path
    opened: int
    shape: tuple[int, ...]
    stored: str
    begin: int

    @property
    def dtype(self) -> np.dtype | None:
        """NumPy's dtype; None where it has none."""
        return jnp.dtype(_NUMPY[self.stored]) if self.stored in _NUMPY else None

    def read(
        self, out: np.ndarray, offset: int = 0, strides: Sequence[int] | None = None
    ) -> np.ndarray:
        """Fills an array, and casts to its dtype.

        Args:
          out: What is filled, of any strides.
          offset: That of the first element in the tensor.
          strides: Those of ``out``'s dimensions in the tensor, in elements; by default the
            elements follow each other.

        Raises:
          ValueError: The file became shorter, or a number is beyond the range of ``out``'s dtype.
        """
        dtype = self.dtype
        assert dtype is not None, self.stored
        strides = contiguous(out.shape) if strides is None else strides
        for band in bands(out.shape, dtype.itemsize) if out.size else ():
            index: Any = (*band, ...)
            part = out[index]
            direct = part.dtype == dtype and part.flags.c_contiguous
            data = part if direct else np.empty(part.shape, dtype)
            length, offsets = runs(part.shape, strides)
            offsets = self.begin + dtype.itemsize * (offsets + offset + start(band, strides))
            rows, step = memoryview(data.reshape(-1).view(np.uint8)), length * dtype.itemsize
            for i, at in enumerate(offsets.tolist()):
                self._fill(rows[i * step : (i + 1) * step], at)
            if not direct:
                part[...] = cast(data, out.dtype, f"{self.file}: {self.name}")
        return out

    def _fill(self, row: memoryview, at: int) -> None:
        while row:
            count = os.preadv(self.opened, [row], at)
            if not count:
                raise ValueError(f"{self.file} became shorter while it was read: copy it again")
            row, at = row[count:], at + count


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, FileTensor]]:
    """The tensors of a file or a folder by name. They can be read while the context is open.

    A folder has `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
      FileNotFoundError: The path, or a file that the index names, does not exist.
      ValueError: A file is cut short or no safetensors, or the index and its files disagree.
    """
    path = pathlib.Path(path)
    with contextlib.ExitStack() as stack:
        if path.is_dir() and not (path / SINGLE).exists():
            yield _open_indexed(path, stack)
        else:
            yield _open_file(path / SINGLE if path.is_dir() else path, stack)


def _open_indexed(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, FileTensor]:
    files = _files_of(folder)
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"{folder / INDEX} names {file.name}, which is not in the folder: copy it there too"
            )
    tensors: dict[str, FileTensor] = {}
    for file, named in files.items():
        found = _open_file(file, stack)
        if wrong := named ^ found.keys():
            some = min(wrong)
            raise ValueError(
                f"{folder / INDEX} "
                + (f"places {some} in" if some in named else f"says nothing of {some} in")
                + f" {file.name}, the file {'lacks' if some in named else 'has'} it "
                f"({len(wrong)} such tensors): copy index and files from the same save"
            )
        tensors |= found
    return tensors


def _files_of(folder: pathlib.Path) -> dict[pathlib.Path, set[str]]:
    """The tensors that the index places in each file."""
    index = folder / INDEX
    if not index.exists():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE} nor {INDEX}: give a folder with one of them, or a "
            "file. Other formats (pytorch_model.bin) are written anew by transformers' "
            "save_pretrained"
        )
    try:
        places = read_json(index).get("weight_map")
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from None
    if not (isinstance(places, dict) and all(isinstance(v, str) for v in places.values())):
        raise ValueError(f"{index}: no weight_map of tensor names to file names; copy it again")
    files: dict[pathlib.Path, set[str]] = {}
    for name, file in places.items():
        files.setdefault(folder / file, set()).add(name)
    return files


def _open_file(path: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, FileTensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: give a safetensors file or its folder")
    file = stack.enter_context(path.open("rb", buffering=0))
    size = path.stat().st_size
    try:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        begin = 8 + length
        tensors = {
            name: FileTensor(
                name,
                path,
                file.fileno(),
                tuple(map(int, about["shape"])),
                str(about["dtype"]),
                begin + about["data_offsets"][0],
            )
            for name, about in header.items()
        }
        _check(
            tensors,
            {name: header[name]["data_offsets"][1] + begin for name in tensors},
            begin,
            size,
        )
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{path} ({size} bytes) is cut short or no safetensors file ({error}): copy it again "
            "(`git lfs pull` where git keeps the large files elsewhere)"
        ) from None
    return tensors


def _check(tensors: dict[str, FileTensor], ends: dict[str, int], begin: int, size: int) -> None:
    """Refuse tensors that do not fill the file from ``begin`` on, one after the other."""
    places = sorted((tensor.begin, ends[name], name) for name, tensor in tensors.items())
    bounds = [begin, *(end for _, end, _ in places)]
    for (at, end, name), (last, _) in zip(places, itertools.pairwise(bounds), strict=True):
        tensor = tensors[name]
        if at != last:
            raise ValueError(f"{name} begins at byte {at}, not {last}")
        if tensor.dtype and end - at != math.prod(tensor.shape) * tensor.dtype.itemsize:
            raise ValueError(f"{name} {tensor.stored} {[*tensor.shape]} has {end - at} bytes")
    if bounds[-1] != size:
        raise ValueError(f"its tensors end at byte {bounds[-1]}")


def read_json(file: pathlib.Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: The file holds something else.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"not JSON ({error}): copy the file again") from None
    if not isinstance(values, dict):
        raise ValueError(f"a JSON {type(values).__name__} where an object is needed")
    return values
