"""``save``: parameters as safetensors files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from zerojax.plan.stored import unwrap_stored
from zerojax.weights.arrangement import Bounds, Link
from zerojax.weights.cast import cast
from zerojax.weights.names import Linked, Names, Tensor, link
from zerojax.weights.shards import to_host
from zerojax.weights.tree import open_tree
from zerojax.weights.writer import DTYPES, BlockWriter, Path, TensorSpec, writing
from zerojax.xla.types import PyTree, Shaped

MAX_FILE_BYTES = 5 * 10**9
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def save(
    folder: Path,
    params: PyTree,
    names: Names | Mapping[str, str | Tensor | None] | None = None,
    *,
    config: Mapping[str, object] | Path | None = None,
    texts: Mapping[str, str] | None = None,
    dtype: DTypeLike | None = None,
    max_shard_size: int = MAX_FILE_BYTES,
) -> None:
    """Writes parameters as a folder that :func:`load` and transformers read.

    The folder has ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and an index if
    the total exceeds ``max_shard_size`` bytes. The host holds one device's shard of one array at a
    time. The files get their names at the end, so an earlier error leaves the folder unchanged.

    Args:
      folder: The folder to write, created if it does not exist.
      params: A tree of arrays, an ``nnx.State`` or an ``nnx.Module``, on any devices of this
        process. The arrays of NNX's random streams are left out.
      names: The tensors' names, as for :func:`load`.
      config: The model's ``config.json``, which transformers needs: its content, or a file or
        folder to copy the file from. From a folder, ``generation_config.json`` is copied too.
      texts: The contents of other files in the folder, by name.
      dtype: The dtype of the float tensors; None keeps the arrays' dtypes.
      max_shard_size: The largest size of a file in bytes. A larger tensor gets a separate file.

    Raises:
      ValueError: The names do not fit the parameters, an array is stored on devices of other
        processes, or tied parameters differ.
      FileNotFoundError: ``config`` does not exist.
    """
    opened = open_tree(params)
    shapes = {path: tuple(x.shape) for path, x in opened.leaves.items()}
    linked = link(names, shapes)
    for path, leaf in opened.leaves.items():
        if not getattr(unwrap_stored(leaf), "is_fully_addressable", True):
            raise ValueError(
                f"params: {path} {[*leaf.shape]} has shards in other processes: save a checkpoint "
                "and run `python -m zerojax export`, or gather the parameters "
                "(jax.experimental.multihost_utils.process_allgather)"
            )
    dtypes = {path: saved_dtype(path, opened.leaves[path].dtype, dtype) for path in linked.links}
    texts = {**({} if config is None else config_files(config)), **(texts or {})}
    tensors = specs(linked, dtypes)
    check_tied(linked, opened.leaves.__getitem__)
    with writing(folder, tensors, max_bytes=max_shard_size, texts=texts) as put:
        for path, links in linked.links.items():
            if path not in linked.tied:
                for bounds, shard in to_host(opened.leaves[path]):
                    write(put, links, bounds, shard, dtypes[path], path)


def saved_dtype(path: str, dtype: DTypeLike, floats: DTypeLike | None = None) -> np.dtype:
    """Returns a parameter's dtype in a file: ``floats`` if passed and the parameter is a float.

    Raises:
      ValueError: safetensors has no such dtype.
    """
    dtype = jnp.dtype(floats if floats and jnp.issubdtype(dtype, jnp.floating) else dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"{path} is {dtype.name}, which safetensors does not have: cast it first")
    return dtype


def specs(linked: Linked, dtypes: Mapping[str, np.dtype]) -> list[TensorSpec]:
    """Returns the specs of the tensors to write.

    Raises:
      ValueError: The parameters of one tensor have different dtypes.
    """
    tensor_dtypes: dict[str, np.dtype] = {}
    for path, links in linked.links.items():
        for part in links if path not in linked.tied else ():
            if tensor_dtypes.setdefault(part.tensor, dtypes[path]) != dtypes[path]:
                raise ValueError(
                    f"{part.tensor} is {tensor_dtypes[part.tensor].name} by one parameter and "
                    f"{dtypes[path].name} by {path}: pass a dtype to save"
                )
    return [TensorSpec(name, linked.tensors[name], dtype) for name, dtype in tensor_dtypes.items()]


def write(
    put: BlockWriter,
    links: Sequence[Link],
    bounds: Bounds,
    values: np.ndarray,
    dtype: np.dtype,
    path: str,
) -> None:
    """Writes the slice ``values`` of a parameter, which is within ``bounds``, to its tensors."""
    values = cast(values, dtype, path)
    for part in links:
        if block := part.block(values, bounds):
            put(part.tensor, *block)


def config_files(config: Mapping[str, object] | Path) -> dict[str, str]:
    """Returns the contents of a model's config files, by file name.

    Args:
      config: The content of ``config.json``, or a file or folder with this content. From a folder,
        ``generation_config.json`` is read too.

    Raises:
      FileNotFoundError: The file does not exist.
    """
    if isinstance(config, Mapping):
        return {CONFIG_FILE: json_text(config)}
    path = pathlib.Path(config)
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"config: {file} does not exist: pass the folder of the weights")
    files = {CONFIG_FILE: file}
    if path.is_dir() and (other := path / GENERATION_FILE).is_file():
        files[GENERATION_FILE] = other
    return {name: each.read_text(encoding="utf-8") for name, each in files.items()}


def json_text(values: Mapping[str, object]) -> str:
    """Returns the text of a file such as ``config.json``."""
    return json.dumps(values, indent=2) + "\n"


def check_tied(linked: Linked, parameter: Callable[[str], Shaped]) -> None:
    """Checks that tied parameters, which share a tensor, are equal.

    Args:
      linked: The parameters and their links to tensors.
      parameter: Returns the array of a parameter.

    Raises:
      ValueError: Two parameters of one tensor differ.
    """
    for path in sorted(linked.tied & linked.links.keys()):
        for part in linked.links[path]:
            owners = [
                (other, link)
                for other, links in linked.links.items()
                for link in links
                if link.tensor == part.tensor and other not in linked.tied
            ]
            tensor = _assemble(owners, parameter)
            with_tied = _assemble([*owners, (path, part)], parameter)
            if not np.array_equal(tensor, with_tied):
                raise ValueError(
                    f"{path} and {owners[0][0]} are both {part.tensor}, and differ: name each"
                )


def _assemble(links: Sequence[tuple[str, Link]], parameter: Callable[[str], Shaped]) -> np.ndarray:
    """Assembles a full tensor from parameters; later links overwrite earlier ones."""
    part = links[0][1]
    tensor = np.empty(part.tensor_shape, parameter(links[0][0]).dtype)
    flat = tensor.reshape(-1)
    for path, part in links:
        for bounds, shard in to_host(parameter(path)):
            if block := part.block(shard, bounds):
                values, offset, strides = block
                byte_strides = [stride * flat.itemsize for stride in strides]
                np.lib.stride_tricks.as_strided(flat[offset:], values.shape, byte_strides)[...] = (
                    values
                )
    return tensor
