"""The tensors of safetensors files, read slice by slice.

Example::

    with open_tensors("gpt2") as tensors:                # a folder or a file; headers alone
        tensors["wte.weight"].shape                      # (50257, 768)
        tensors["wte.weight"].read((slice(0, 8), slice(None)))

The format: https://huggingface.co/docs/safetensors; several files with an index that says which
tensor is where: https://huggingface.co/docs/transformers/big_models.
"""

import contextlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zerojax.checkpoint.safetensors_files import INDEX, SINGLE, Path, import_safetensors


class Tensor(NamedTuple):
    """A tensor in a file.

    Attributes:
      file: The file.
      shape: The tensor's shape.
      dtype: Its dtype in safetensors' words, "F32".
      read: Reads the part that a tuple of slices picks.
    """

    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice, ...]], np.ndarray]


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[dict[str, Tensor]]:
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


def _open_indexed(folder: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    files = _files_of(folder)
    for file in files:
        if not file.exists():
            raise FileNotFoundError(
                f"{folder / INDEX} names {file.name}, which is not in the folder: copy it there too"
            )
    tensors: dict[str, Tensor] = {}
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


def _open_file(file: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Tensor]:
    library = import_safetensors()
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there: give a safetensors file or its folder")
    try:
        opened = stack.enter_context(library.safe_open(file, framework="numpy"))
    except library.SafetensorError as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is cut short or no safetensors file ({error}): "
            "copy it again (`git lfs pull` where git keeps the large files elsewhere)"
        ) from None
    views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, no mapping
    return {
        name: Tensor(file, tuple(view.get_shape()), view.get_dtype(), view.__getitem__)
        for name, view in views.items()
    }


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
