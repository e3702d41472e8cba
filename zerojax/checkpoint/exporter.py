"""``export``: the parameters of a checkpoint as safetensors, from its files only."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.checksum import share
from zerojax.checkpoint.errors import CheckpointError, DamagedCheckpointError
from zerojax.checkpoint.naming import Names, parameters, rename
from zerojax.checkpoint.record import Record
from zerojax.checkpoint.saved import SavedArray, SavedStep, find
from zerojax.weights.arrangement import Link
from zerojax.weights.saver import check_tied, config_files, saved_dtype, specs, write
from zerojax.weights.writer import BlockWriter, Path, writing

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]I?)?B?")


class Exported(NamedTuple):
    """The files, tensors, bytes and distinct dtypes that :func:`export` wrote."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    dtypes: tuple[str, ...]


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    names: Names | None = None,
    config: Mapping[str, object] | Path | None = None,
    progress: Callable[[int, int], object] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Writes a saved step's parameters as ``model.safetensors``, or as several files and an index.

    The parameters are the ``params`` of a ``TrainState``, or an NNX model with its batch statistics
    and without its PRNG streams. Each is read, checked against the record and written 4 MB at a
    time, independent of the size of arrays and files.

    Args:
      checkpoint: A folder of steps, or one step's folder.
      out: The folder to write, which is empty or does not exist, unless ``overwrite`` is set.
      step: The step; the newest by default.
      dtype: The dtype of the float tensors: "float32", "bfloat16" or "float16". By default the
        saved dtype, or a 16-bit dtype if the run's config sets
        ``stage3_gather_16bit_weights_on_model_save``.
      max_shard_size: The largest size of a file: bytes, or a text such as "500MB" or "1GiB".
      names: The tensors' names, as for :func:`zerojax.weights.save`, or a function that returns
        them and other files, such as ``zerojax.models.hugging_face.gpt2.export_names``; by default
        one tensor for each parameter, named by its keys joined with dots.
      config: The model's ``config.json``: its content, or a file or folder to copy the file from.
        From a folder, ``generation_config.json`` is copied too.
      progress: Called with the bytes read so far and the total bytes.
      overwrite: Whether to replace the weights and other files of an earlier export in ``out``;
        files of other names are kept.

    Raises:
      CheckpointError: the checkpoint does not exist or does not fit the arguments, or ``out``
        cannot be written; ``out`` is unchanged.
      DamagedCheckpointError: an array differs from the saved one; ``out`` is unchanged.
    """
    floats, max_bytes, out = _float(dtype), _bytes(max_shard_size), pathlib.Path(out)
    config_texts = {} if config is None else config_files(config)
    _check_free(out, overwrite)
    if out.resolve().is_relative_to(pathlib.Path(checkpoint).resolve()):
        raise CheckpointError(f"{out} is inside the checkpoint {checkpoint}: choose another folder")
    saved = find(checkpoint, step)
    leaves = parameters(saved)
    linked, texts = rename(leaves, names, saved)
    texts = {**texts, **config_texts}
    floats = floats or _default(saved.record)
    links = {
        name: tensor_links for name, tensor_links in linked.links.items() if name not in linked.tied
    }
    try:
        dtypes = {name: saved_dtype(name, leaves[name].dtype, floats) for name in linked.links}
        tensors = specs(linked, dtypes)
        check_tied(linked, lambda name: saved.read(leaves[name].name))
    except ValueError as error:
        raise CheckpointError(f"{saved.folder}: {error}") from error
    done, total = 0, sum(leaves[name].bytes for name in links)
    try:
        with writing(out, tensors, max_bytes=max_bytes, texts=texts) as put:
            for name in links:
                for nbytes in _written(saved, leaves[name], links[name], dtypes[name], put):
                    done += nbytes
                    if progress:
                        progress(done, total)
    except OSError as error:
        needed = sum(tensor.nbytes for tensor in tensors)
        raise CheckpointError(
            f"{out} cannot be written: {error}; choose another folder, with {needed:,} bytes free"
        ) from error
    return Exported(
        files=tuple(sorted(file.name for file in out.iterdir())),
        tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
        dtypes=tuple(sorted({tensor.dtype.name for tensor in tensors})),
    )


def _written(
    saved: SavedStep, leaf: SavedArray, links: Sequence[Link], dtype: np.dtype, put: BlockWriter
) -> Iterator[int]:
    """Writes a parameter block by block and compares its checksum with the record's; yields the
    bytes of each block."""
    checksum = 0
    try:
        for start, block in saved.blocks(leaf.name):
            if saved.record:
                checksum += share(block, start)
            bounds = tuple((begin, begin + n) for begin, n in zip(start, block.shape, strict=True))
            write(put, links, bounds, block, dtype, leaf.name)
            yield block.nbytes
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if saved.record and checksum % 2**32 != saved.record.leaves[leaf.name].checksum:
        raise DamagedCheckpointError(
            f"{saved.item}: {leaf.name} differs from what was saved: export another step"
        )


def _float(dtype: str | None) -> np.dtype | None:
    if dtype is None:
        return None
    name = _SHORT.get(dtype, dtype)
    if name not in _SHORT.values():
        raise CheckpointError(f"dtype {dtype!r}: choose one of {', '.join(_SHORT.values())}")
    return jnp.dtype(name)


def _default(record: Record | None) -> np.dtype | None:
    """Returns the 16-bit dtype that the run's config requests; None for the saved dtype."""
    if record is None or not record.config.get("stage3_gather_16bit_weights_on_model_save"):
        return None
    return jnp.dtype("float16" if record.compute_dtype == "fp16" else "bfloat16")


def _bytes(size: int | str) -> int:
    """Parses a size; returns bytes.

    Example:
      >>> _bytes("1.5 GB"), _bytes("500mb"), _bytes("1GiB"), _bytes("4096")
      (1500000000, 500000000, 1073741824, 4096)
    """
    value = 0
    match = _SIZE.fullmatch(str(size).upper()) if isinstance(size, int | str) else None
    if match:
        unit = match[2] or " "
        value = int(float(match[1]) * (1024 if "I" in unit else 1000) ** " KMGT".index(unit[0]))
    if value < 1:
        raise CheckpointError(f'max_shard_size {size!r}: pass bytes, or a size such as "5GB"')
    return value


def _check_free(out: pathlib.Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir() or (not overwrite and any(out.iterdir())):
        what = "not empty" if out.is_dir() else "a file"
        raise CheckpointError(f"{out} is {what}: choose another folder")
