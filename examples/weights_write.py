"""Safetensors written file by file.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     tensor = Pending("wte.weight", 12, lambda: np.zeros(3, np.float32))
...     write_folder(folder, [tensor], max_bytes=10**9)
...     os.listdir(folder)
['model.safetensors']
"""

import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.weights_read import INDEX, SINGLE, Path, import_safetensors

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|" + re.escape(INDEX))


class Pending(NamedTuple):
    """A tensor to be written: `fetch` brings it to the host when its file's turn comes."""

    name: str
    nbytes: int
    fetch: Callable[[], np.ndarray]


def write_folder(
    folder: Path,
    tensors: Sequence[Pending],
    *,
    max_bytes: int,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as `model.safetensors`, or in several files of at most `max_bytes` and an
    index. One tensor above `max_bytes` has a file of its own.

    The host holds the tensors of one file at a time. All is first written under a temporary name
    and moved in place at the end: an error on the way leaves the folder as it was. What an earlier
    save left beside it, which a reader might take for these weights, is then removed.

    Args:
      texts: other files of the folder, by name.
    """
    library = import_safetensors()
    groups = _grouped(tensors, max_bytes)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    texts = dict(texts or {})
    if len(groups) == 1:
        names = [SINGLE]
    else:
        texts[INDEX] = json.dumps(_index(names, groups), indent=2) + "\n"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        there = pathlib.Path(temporary)
        for name, group in zip(names, groups, strict=True):
            part = {tensor.name: tensor.fetch() for tensor in group}
            # transformers refuses a file that does not say what it was written for.
            library.numpy.save_file(part, there / name, metadata={"format": "pt"})
            del part  # before the next file's tensors come
        for name, text in texts.items():
            (there / name).write_text(text, encoding="utf-8")
        for name in [*names, *texts]:
            os.replace(there / name, folder / name)
    for file in folder.iterdir():
        if WEIGHTS.fullmatch(file.name) and file.name not in (*names, *texts):
            file.unlink()


def _grouped(tensors: Sequence[Pending], max_bytes: int) -> list[list[Pending]]:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
        raise ValueError(f"a file's size must be a positive int in bytes, not {max_bytes!r}")
    groups: list[list[Pending]] = [[]]
    room = max_bytes
    for tensor in tensors:
        if groups[-1] and tensor.nbytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.nbytes
    return groups


def _index(names: Sequence[str], groups: Sequence[Sequence[Pending]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(tensor.nbytes for group in groups for tensor in group)},
        "weight_map": {
            tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group
        },
    }
