"""The parameters among saved arrays, and the names of the tensors they are exported as."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.record import decoded
from zerojax.checkpoint.safetensors_files import DTYPES, TensorSpec
from zerojax.checkpoint.saved import SavedArray, SavedStep
from zerojax.checkpoint.state_tree import PARAMS, Form, Path, unboxed


class Renamed(NamedTuple):
    """The names of a model's tensors elsewhere.

    Attributes:
      tensors: By parameter: pairs of a tensor's name and its index of the first dimension, None
        for the whole parameter. A parameter without pairs is left out.
      texts: Other files of the folder by name, such as ``config.json``.
    """

    tensors: Mapping[str, Sequence[tuple[str, int | None]]]
    texts: Mapping[str, str]


Names = Callable[[Mapping[str, tuple[int, ...]], Any], Renamed]
"""Takes the parameters' names and shapes, and the ``extra`` of the save; a ValueError says why the
files cannot be made."""


class TensorPart(NamedTuple):
    """A tensor, and its index of its parameter's first dimension; None for the whole parameter."""

    tensor: TensorSpec
    at: int | None


def parameters(saved: SavedStep) -> dict[str, SavedArray]:
    """The parameters by name: their keys, without flax's boxes, with dots between.

    Of a ``TrainState`` the arrays under ``params``, of NNX the model without its PRNG streams.

    Raises:
      CheckpointError: no array is a parameter.
    """
    leaves = [*saved.arrays()]
    roots = sorted({leaf.path[0] for leaf in leaves})
    form: Form = "linen" if "params" in roots else "nnx"
    prefix = PARAMS[saved.record.form if saved.record else form]
    below = {
        unboxed(leaf.path)[len(prefix) :]: leaf
        for leaf in leaves
        if leaf.path[: len(prefix)] == prefix
    }
    if not below:
        raise CheckpointError(
            f"{saved.item} has nothing under {'.'.join(prefix)!r}, it has {', '.join(roots)}: "
            "export takes the parameters of a TrainState or of nnx.state((model, optimizer))"
        )
    streams = _streams(below)
    return {
        ".".join(path) or prefix[-1]: leaf
        for path, leaf in below.items()
        if path[:-1] not in streams and not _is_key(saved, leaf)
    }


def _streams(leaves: Mapping[Path, SavedArray]) -> set[Path]:
    """The paths of NNX's PRNG streams: modules of a key and a count."""
    held: dict[Path, dict[Path, str]] = defaultdict(dict)
    for path, leaf in leaves.items():
        held[path[:-1]][path[-1:]] = leaf.dtype.name
    stream = {("key",): "uint32", ("count",): "uint32"}
    return {path for path, dtypes in held.items() if dtypes == stream}


def _is_key(saved: SavedStep, leaf: SavedArray) -> bool:
    """Whether an array is of PRNG keys, which are numbers on disk."""
    return saved.record is not None and saved.record.leaves[leaf.name].dtype.startswith("key<")


def rename(leaves: Mapping[str, SavedArray], names: Names | None, saved: SavedStep) -> Renamed:
    """The result of ``names``, checked; by default a tensor for each parameter.

    Raises:
      CheckpointError: ``names`` refuses, names an unknown parameter, or one tensor twice.
    """
    if names is None:
        return Renamed({name: [(name, None)] for name in leaves}, {})
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    try:
        renamed = names(shapes, decoded(saved.record.extra) if saved.record else None)
    except ValueError as error:
        raise CheckpointError(f"{saved.folder}: {error}") from error
    if odd := renamed.tensors.keys() ^ leaves.keys():
        name = min(odd)
        said = "nothing of the parameter" if name in leaves else "something of an unknown parameter"
        raise CheckpointError(f"{saved.folder}: the names given say {said} {name}")
    for name, tensors in renamed.tensors.items():
        for tensor, index in tensors:
            if index is not None and index not in range(*shapes[name][:1]):
                raise CheckpointError(f"{tensor}: {name} {list(shapes[name])} has no index {index}")
    counts = Counter(tensor for tensors in renamed.tensors.values() for tensor, _ in tensors)
    if twice := [tensor for tensor, n in counts.items() if n > 1]:
        raise CheckpointError(f"{saved.folder}: the names given have {twice[0]} twice")
    return renamed


def tensor_parts(
    name: str, leaf: SavedArray, renamed: Renamed, floats: np.dtype | None
) -> Iterator[TensorPart]:
    """The tensors of a parameter.

    Args:
      name: Of the parameter.
      leaf: The parameter.
      renamed: The names of the tensors.
      floats: The dtype of float tensors; None for the saved one.

    Raises:
      CheckpointError: safetensors has no such dtype.
    """
    dtype = floats if floats and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype
    if dtype.name not in DTYPES:
        raise CheckpointError(f"{name} is {dtype.name}, which safetensors does not have")
    for tensor, at in renamed.tensors[name]:
        yield TensorPart(
            TensorSpec(tensor, leaf.shape if at is None else leaf.shape[1:], dtype), at
        )
