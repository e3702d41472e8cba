"""Selection of the parameters among saved arrays, and their tensor names in an export."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from zerojax import weights
from zerojax.checkpoint.errors import CheckpointError
from zerojax.checkpoint.saved import SavedArray, SavedStep
from zerojax.checkpoint.state_tree import PARAMS, Form, Path, unboxed
from zerojax.weights.names import Linked, link
from zerojax.xla.types import PyTree


class Renamed(NamedTuple):
    """The names of a model's tensors in another library.

    Attributes:
      names: A map as for ``zerojax.weights.save``, with ``/`` between a parameter's keys.
      texts: The contents of other files of the folder, by name, such as ``config.json``.
    """

    names: weights.Names | Mapping[str, str | weights.Tensor | None] | None
    texts: Mapping[str, str]


Map = weights.Names | Mapping[str, str | weights.Tensor | None]
Names = Callable[[Mapping[str, tuple[int, ...]], PyTree], Renamed] | Map
"""A map as for ``zerojax.weights.save``; or a function of the parameters' shapes by name and the
``extra`` of the save. Its ValueError states why the files cannot be written."""


def parameters(saved: SavedStep) -> dict[str, SavedArray]:
    """Returns the parameters by name: their keys, without flax's boxes, joined with dots.

    For a ``TrainState``, these are the arrays under ``params``; for NNX, the model without its PRNG
    streams.

    Raises:
      CheckpointError: no array is a parameter.
    """
    leaves = [*saved.arrays()]
    roots = sorted({leaf.path[0] for leaf in leaves})
    form: Form = "linen" if "params" in roots else "nnx"
    prefix = PARAMS[saved.record.form if saved.record else form]
    by_path = {
        unboxed(leaf.path)[len(prefix) :]: leaf
        for leaf in leaves
        if leaf.path[: len(prefix)] == prefix
    }
    if not by_path:
        raise CheckpointError(
            f"{saved.item} has {', '.join(roots)}, and no parameters at {'.'.join(prefix)!r}: "
            "export a TrainState or nnx.state((model, optimizer))"
        )
    streams = _streams(by_path)
    return {
        ".".join(path) or prefix[-1]: leaf
        for path, leaf in by_path.items()
        if path[:-1] not in streams and not _is_key(saved, leaf)
    }


def _streams(leaves: Mapping[Path, SavedArray]) -> set[Path]:
    """Returns the paths of NNX's PRNG streams: modules that hold only a key and a count."""
    dtypes_by_module: dict[Path, dict[Path, str]] = defaultdict(dict)
    for path, leaf in leaves.items():
        dtypes_by_module[path[:-1]][path[-1:]] = leaf.dtype.name
    stream_dtypes = {("key",): "uint32", ("count",): "uint32"}
    return {path for path, dtypes in dtypes_by_module.items() if dtypes == stream_dtypes}


def _is_key(saved: SavedStep, leaf: SavedArray) -> bool:
    """Returns whether an array holds PRNG keys, which are uint32 on disk."""
    return saved.record is not None and saved.record.leaves[leaf.name].dtype.startswith("key<")


def rename(
    leaves: Mapping[str, SavedArray], names: Names | None, saved: SavedStep
) -> tuple[Linked, Mapping[str, str]]:
    """Applies ``names`` to the parameters; the default is one tensor for each parameter.

    Args:
      leaves: The parameters by name.

    Returns:
      The tensors, by the parameters' names, and the contents of other files by name.

    Raises:
      CheckpointError: ``names`` raises a ValueError, or its result does not fit the parameters.
    """
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    try:
        renamed = names(shapes, saved.extra(None)) if callable(names) else Renamed(names, {})
        paths = {name.replace(".", "/"): name for name in leaves}
        linked = link(renamed.names, {path: shapes[name] for path, name in paths.items()})
    except ValueError as error:
        raise CheckpointError(f"{saved.folder}: {error}") from error
    links = {paths[path]: tensor_links for path, tensor_links in linked.links.items()}
    tied = frozenset(paths[path] for path in linked.tied)
    return Linked(links, linked.tensors, tied), renamed.texts
