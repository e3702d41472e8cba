"""The tree that orbax writes for a training state, and the path of each array in the tree.

A flax ``TrainState`` or any other pytree is written unchanged, and NNX objects as
``nnx.state((model, optimizer, ...))``: names begin with ``0`` for the model, ``1`` for the
optimizer, and ``2`` and so on for other objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import jax
from flax import nnx

from zerojax.optim.wrap import ZeroOptState
from zerojax.train_state.linen import is_train_state
from zerojax.train_state.nnx import has_one_optimizer, ordered
from zerojax.train_state.pytree import is_array
from zerojax.xla.types import PyTree, Shaped

Path = tuple[str, ...]
Form = Literal["linen", "nnx", "pytree"]

PARAMS: dict[Form, Path] = {"linen": ("params",), "nnx": ("0",), "pytree": ("params",)}
OPTIMIZER: dict[Form, Path] = {
    "linen": ("opt_state",),
    "nnx": ("1", "opt_state"),
    "pytree": ("opt_state",),
}
NUMBERS: dict[Form, Path] = {"linen": ("tx", "numbers"), "nnx": ("1", "tx", "numbers")}
"""The path of zerojax's numbers, such as the loss scale, beside the optimizer's state."""
STEP: dict[Form, Path] = {"linen": ("step",), "nnx": ("1", "step")}


def numbers_of(state: PyTree, form: Form) -> list[Path]:
    """Returns the paths of zerojax's numbers in a state: beside the optimizer's state, or in a
    pytree where an optimizer of :func:`zerojax.zero` has its own."""
    if form in NUMBERS:
        return [NUMBERS[form]]
    nodes = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: isinstance(x, ZeroOptState)
    )
    return [strings(keys) for keys, x in nodes if isinstance(x, ZeroOptState)]


def form_of(state: PyTree) -> Form:
    """Returns the kind of a state: a TrainState, a tuple of a model, its optimizer and further NNX
    objects, or any other pytree, such as only parameters."""
    if isinstance(state, tuple) and has_one_optimizer(state):
        return "nnx"
    return "linen" if is_train_state(state) else "pytree"


def tree_of(state: PyTree) -> PyTree:
    """Returns the tree that orbax writes, without leaves that are not arrays and without arrays
    that have no elements, which orbax refuses."""
    nnx_form = form_of(state) == "nnx"
    tree = nnx.state(tuple(state[i] for i in ordered(state))) if nnx_form else state
    return jax.tree.map(
        lambda x: x if is_array(x) and 0 not in getattr(x, "shape", ()) else None, tree
    )


def arrays_by_name(tree: PyTree) -> dict[str, PyTree]:
    """Returns the arrays of a tree from :func:`tree_of`, by orbax's names."""
    return {
        ".".join(strings(keys)): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def below(prefix: Path, tree: PyTree) -> list[Path]:
    """Returns the paths of a tree's arrays under ``prefix``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [unboxed((*prefix, *strings(keys))) for keys, _ in leaves]


def unboxed(path: Path) -> Path:
    """Drops the final ``value``, the box in which flax keeps an array with its metadata.

    Example:
      >>> unboxed(("params", "kernel", "value"))
      ('params', 'kernel')
    """
    return path[:-1] if path[-1:] == ("value",) else path


def strings(keys: Iterable[object]) -> Path:
    """Converts JAX's keys of a leaf to the strings that orbax writes."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def is_key(x: Shaped) -> bool:
    """Returns whether an array, abstract or not, holds PRNG keys."""
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def data_of(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the form in which an array is on disk, which for PRNG keys is that of their data."""
    if not is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def key_impl(x: jax.ShapeDtypeStruct) -> str:
    """Returns the name of the implementation of abstract PRNG keys."""
    names: list[str] = []
    jax.eval_shape(lambda keys: names.append(str(jax.random.key_impl(keys))), x)
    return names[0]
