"""``load``: parameters from safetensors files, read shard by shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from zerojax.distributed import log
from zerojax.plan.stored import unwrap_stored, user_leaf
from zerojax.weights.arrangement import Bounds, Link
from zerojax.weights.names import Linked, Names, Tensor, link, refuse
from zerojax.weights.reader import FileTensor, open_tensors
from zerojax.weights.shards import from_shards, padded_shape, zeros
from zerojax.weights.tree import open_tree
from zerojax.weights.writer import Path
from zerojax.xla.types import PyTree, Shaped

_ROWS = 1024  # rows of a tied tensor that are compared at a time


def load(
    folder: Path,
    *,
    like: PyTree,
    names: Names | Mapping[str, str | Tensor | None] | None = None,
) -> PyTree:
    """Loads parameters from a folder of safetensors files.

    Each process reads each distinct shard of its devices once, and the host holds one shard at a
    time. Names, shapes and dtypes are checked before any parameter is read.

    Args:
      folder: A folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its
        files; or one file.
      like: The parameters' shapes, dtypes and shardings: a tree of arrays or
        ``jax.ShapeDtypeStruct``, an ``nnx.State`` or an ``nnx.Module``, such as ``.params`` of
        ``zero.init`` or ``zero.abstract_state``. An array without a sharding is placed on JAX's
        default device. A cast of floats is logged.
      names: The tensors' names by parameter; by default the parameters' keys joined with dots.

    Returns:
      A tree like ``like``; if ``like`` is a module, a new module with the random streams of
      ``like``.

    Raises:
      ValueError: The names do not fit the parameters; a tensor is missing, not used by any
        parameter, or of another shape or dtype; a file is damaged.
      FileNotFoundError: A file does not exist.

    Example:
      >>> import tempfile
      >>> from zerojax import weights
      >>> params = {"up": {"kernel": jnp.arange(6.0).reshape(2, 3)}, "norm": {"scale": jnp.ones(2)}}
      >>> names = {
      ...     "up/kernel": weights.Tensor("mlp.up.weight", "o i -> i o"),
      ...     "norm/scale": "norm.weight",
      ... }
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     weights.save(folder, params, names)
      ...     loaded = weights.load(folder, like=jax.eval_shape(lambda: params), names=names)
      >>> loaded["up"]["kernel"].tolist()
      [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    opened, names = open_tree(like), Names.of(names)
    linked = link(names, {path: tuple(x.shape) for path, x in opened.leaves.items()})
    dtypes = {
        path: jax.dtypes.canonicalize_dtype(opened.leaves[path].dtype) for path in linked.links
    }
    with open_tensors(folder) as tensors:
        sources = fit(str(folder), names, linked, tensors, dtypes)
        _log_casts(str(folder), linked, sources, dtypes)
        loaded = {
            path: _array(opened.leaves[path], dtypes[path], links, sources)
            for path, links in linked.links.items()
        }
    return opened.close(loaded)


def fit(
    source: str,
    names: Names,
    linked: Linked,
    tensors: Mapping[str, FileTensor],
    dtypes: Mapping[str, np.dtype],
) -> dict[str, FileTensor]:
    """Checks the tensors found against the parameters; returns the needed tensors by name.

    Args:
      source: The file or folder, for messages.
      names: The names.
      linked: The parameters and their links to tensors.
      tensors: The tensors found.
      dtypes: The parameters' dtypes.

    Raises:
      ValueError: Tensors are missing, not used by any parameter, or of a wrong shape or dtype; or a
        copy differs from its original.
    """
    problems = []
    found: dict[str, FileTensor] = {}
    for name, tensor in tensors.items():
        short = names.short(name)
        if short in found:
            problems.append(
                f"{tensor.file}: {short} is there twice, as {found[short].name} and {name}"
            )
        found[short] = tensor
    needed = {name: name.removeprefix(names.prefix) for name in linked.tensors}
    copies = {
        short: names.tied[each].removeprefix(names.prefix)
        for each in names.tied
        if (short := each.removeprefix(names.prefix)) not in needed.values()
    }
    for name in sorted(linked.tensors.keys() - {n for n, s in needed.items() if s in found}):
        problems.append(f"{name} {[*linked.tensors[name]]} is missing")
    for short in sorted(found.keys() - {*needed.values()} - copies.keys()):
        if not names.is_ignored(short):
            problems.append(f"{short} {[*found[short].shape]} belongs to no parameter of the model")
    sources = {name: found[short] for name, short in needed.items() if short in found}
    owners = {part.tensor: path for path, parts in linked.links.items() for part in parts}
    for name, tensor in sorted(sources.items()):
        path = owners[name]
        problems += _mismatch(name, tensor, linked.tensors[name], path, dtypes[path])
    remedy = (
        "Load into the model that was saved, or pass names={parameter: tensor}, with None for "
        "a parameter without a tensor and Names(ignored=[...]) for other tensors."
    )
    refuse(f"{source} does not fit the model; nothing was loaded", problems, remedy)
    for copy, short in copies.items():
        if copy in found and short in found:
            _check_copy(found[copy], found[short])
    return sources


def _mismatch(
    name: str, tensor: FileTensor, needed: Sequence[int], path: str, dtype: np.dtype
) -> list[str]:
    if tensor.shape != tuple(needed):
        remedy = ""
        if tensor.shape == tuple(needed)[::-1]:
            remedy = ': write the arrangement "o i -> i o", or remove it'
        return [f"{name} is {[*tensor.shape]}, the model needs {[*needed]}{remedy} (for {path})"]
    dtypes = (tensor.dtype, dtype)
    are_floats = all(x is not None and jnp.issubdtype(x, jnp.floating) for x in dtypes)
    if are_floats or tensor.dtype == dtype:
        return []
    return [
        f"{name} {[*tensor.shape]} is {tensor.stored}, the parameter {path} {dtype.name}: save "
        "floats, the only dtypes that are cast"
    ]


def _check_copy(copy: FileTensor, tensor: FileTensor) -> None:
    """Raises ValueError if a copy has other values: the model would compute different results."""
    is_same = copy.shape == tensor.shape and copy.stored == tensor.stored
    rows = tensor.shape[0] if tensor.shape else 1
    width = int(np.prod(tensor.shape[1:]))
    for begin in range(0, rows if is_same else 0, _ROWS):
        block = np.empty((min(_ROWS, rows - begin) * width,), tensor.dtype)
        copy_block = copy.read(np.empty_like(block), begin * width)
        tensor.read(block, begin * width)
        is_same = is_same and np.array_equal(block.view(np.uint8), copy_block.view(np.uint8))
    if not is_same:
        raise ValueError(
            f"{copy.file}: {copy.name} {[*copy.shape]} differs from {tensor.name} "
            f"{[*tensor.shape]}, and the model has one table for both; nothing was loaded. Load "
            "into an untied model"
        )


def _log_casts(
    source: str, linked: Linked, sources: Mapping[str, FileTensor], dtypes: Mapping[str, np.dtype]
) -> None:
    casts = Counter(
        (sources[part.tensor].stored, dtypes[path].name)
        for path, parts in linked.links.items()
        for part in parts
        if sources[part.tensor].dtype != dtypes[path]
    )
    if casts:
        summary = ", ".join(f"{n} tensors {a} become {b}" for (a, b), n in sorted(casts.items()))
        log.warning("%s: %s, the dtype of `like`.", source, summary)


def _array(
    leaf: Shaped, dtype: np.dtype, links: Sequence[Link], sources: Mapping[str, FileTensor]
) -> object:
    """Builds a parameter; reads each distinct shard for the devices that store it."""

    def read(bounds: Bounds) -> np.ndarray:
        shard = zeros(tuple(b - a for a, b in bounds), dtype)
        for part in links:
            if block := part.block(shard, bounds):
                sources[part.tensor].read(*block)
        return shard

    return placed(leaf, read)


def placed(leaf: Shaped, read: Callable[[Bounds], np.ndarray]) -> object:
    """Builds an array like `leaf` from the shards that `read` returns.

    Args:
      leaf: The array's shape and sharding.
      read: Returns the elements within bounds, zeros where they are padding.
    """
    sharding = getattr(unwrap_stored(leaf), "sharding", None)
    assert sharding is None or isinstance(sharding, Sharding)
    at_rest = from_shards(
        padded_shape(leaf.shape, sharding),
        sharding,
        lambda shard: read(tuple((s.start, s.stop) for s in shard.box)),
    )
    return user_leaf(at_rest, leaf.shape)
