"""Quantization of the matrices of a tree of parameters, and its reverse.

The container and the arithmetic are those of qwix, Google's library for quantization in JAX: its
``QArray`` is a pytree node, which its own matrix products and kernels take as well. qwix loads
Pallas, so it is imported on first use.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from zerojax.plan import layout
from zerojax.plan.places import DEVICE
from zerojax.plan.stored import unwrap_stored, user_leaf
from zerojax.quantize.choice import in_stacks, input_dimension, is_floating, is_matrix
from zerojax.train_state.linen import is_train_state, open_state
from zerojax.xla import compat
from zerojax.xla.types import PyTree, Shaped

if TYPE_CHECKING:
    import qwix

Select = Callable[[str, Any], bool]

Bits = int | Literal["nf4"]

_QTYPES = {8: jnp.int8, 4: jnp.int4, "nf4": "nf4"}


class Grid(NamedTuple):
    """The codes of an array, and the elements that share a scale.

    Attributes:
      bits: Bits of a code, or "nf4".
      dimension: The dimension whose elements share scales.
      group_size: Number of consecutive elements that share a scale; None for all.
    """

    bits: Bits
    dimension: int
    group_size: int | None

    def quantized(self, x: jax.Array) -> qwix.QArray:
        """Quantizes an array; the codes are computed in float32 or wider. A number that is not
        finite makes its scale NaN, which the largest element is not on every backend."""
        import qwix

        others = [d for d in range(x.ndim) if d != self.dimension]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        array: qwix.QArray = qwix.quantize(
            wide,
            _QTYPES[self.bits],
            channelwise_axes=others,
            tiled_axes={self.dimension: self.group_size} if self.group_size else None,
        )
        codes, split = array.qvalue, [n for sizes in _tiles(array) for n in sizes]
        if self.bits == "nf4":  # the next value, as in qwix, but element by element on shards
            units = (wide.reshape(split) / _spread(array.scale)).reshape(x.shape)
            pairs = itertools.pairwise(jnp.abs(value - units) for value in _nf4_values())
            steps = (after < before for before, after in pairs)
            codes = sum(steps, jnp.zeros(x.shape, jnp.int32)).astype(codes.dtype)
        within = tuple(range(1, 2 * x.ndim, 2))
        is_finite = jnp.isfinite(x).reshape(split).all(within)
        return self.like(codes, jnp.where(is_finite, array.scale.astype(x.dtype), jnp.nan))

    def like(self, codes: Any, scales: Any) -> qwix.QArray:
        """Returns the node of a quantized array with other leaves."""
        import qwix

        return qwix.QArray(codes, scales, None, _QTYPES[self.bits])

    def shardings(self, sharding: NamedSharding, ndim: int) -> tuple[NamedSharding, NamedSharding]:
        """Returns the shardings of codes and scales from that of the array."""
        spec = list(layout.full(sharding.spec, ndim))
        if self.group_size is None:
            spec[self.dimension] = None
        return sharding, sharding.update(spec=PartitionSpec(*spec))


def quantize_weights(
    params: PyTree, bits: Bits = 8, *, group_size: int | None = None, select: Select | None = None
) -> PyTree:
    r"""Quantizes the matrices of a model to codes with scales, for evaluation and generation, and
    for the frozen base of adapters.

    .. math::

        s_j = \max_i |w_{ij}| \, / \, (2^{b-1} - \tfrac{1}{2}), \quad
        c_{ij} = \operatorname{round}(w_{ij} / s_j)

    With "nf4" :math:`s_j = \max_i |w_{ij}|`, and a code is the position of the value next to
    :math:`w_{ij} / s_j` among 16 quantiles of the normal distribution (Dettmers et al. 2023).

    A scale serves one output channel :math:`j` of one layer: the elements along the largest
    dimension but the last, and in stacks of layers and arrays of four or more dimensions but the
    first, share it; with ``group_size`` those of a group of inputs. A column that contains an
    infinity or NaN becomes NaN.

    Each device quantizes its shards. Codes keep the sharding of the array; scales keep it without
    the dimension that shares them. ``zero.evaluate`` and ``zerojax.generate`` take the result in
    place of the parameters: they gather codes, and dequantize a layer when it is used.
    :func:`zerojax.dequantize` returns ordinary arrays for any other function.

    Args:
      params: A tree of parameters, flax ``TrainState`` or ``nnx.Module``; arrays may be
        ``jax.ShapeDtypeStruct``. Of a ``TrainState``, the result has no optimizer state.
      bits: 8, 4 or "nf4", which takes 4 bits too, and usually ``group_size=64``.
      group_size: Number of consecutive inputs that share a scale; None for all.
      select: ``select(path, array)`` returns whether to quantize an array, which must be floating
        with two or more dimensions. None selects matrices, and stacks of matrices, of more than
        8192 elements, except those named ``embedding``, ``scale`` or ``bias``.

    Returns:
      The tree with a ``qwix.QArray`` in place of each matrix: ``qvalue``, int8, int4 or uint4 codes
      of the array's shape, and ``scale``, in the array's dtype.

    Raises:
      ValueError: ``bits`` or ``group_size`` is not supported, an array is quantized already, or no
        array is selected.
      TypeError: ``select`` selects an array that is not a floating matrix, or ``params`` is an
        optimizer.

    Example:
      >>> params = {"kernel": jnp.ones((128, 256)), "bias": jnp.zeros(256)}
      >>> quantized = quantize_weights(params)
      >>> quantized["kernel"].qvalue.dtype, quantized["kernel"].scale.shape
      (dtype('int8'), (1, 256))
      >>> bool(jnp.allclose(dequantize(quantized)["kernel"], 1, atol=0.004))
      True
    """
    _check(bits, group_size)
    if isinstance(params, nnx.Optimizer):
        raise TypeError("quantize_weights: an nnx.Optimizer has no weights: pass the nnx.Module.")
    if isinstance(params, nnx.Module):
        states: list[Any]
        graph, *states = nnx.split(params, nnx.Param, ...)
        weights, rest = states
        quantized = quantize_weights(weights, bits, group_size=group_size, select=select)
        return nnx.merge(graph, quantized, rest)
    if is_train_state(params):
        opened = open_state(params)
        quantized = quantize_weights(params.params, bits, group_size=group_size, select=select)
        parts = opened.parts._replace(params=quantized, opt_state=optax.EmptyState())
        return opened.kind.close(parts, _NO_OPTIMIZER)[0]
    leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_quantized)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    stacked = in_stacks([path for path, _ in leaves], [getattr(x, "shape", ()) for _, x in leaves])
    given = list(zip(names, (x for _, x in leaves), stacked, strict=True))
    chosen = [_choose(*each, select) for each in given]
    if not any(chosen):
        raise ValueError(
            "quantize_weights: no array is a matrix of more than 8192 elements (apart from "
            'embeddings): pass select=lambda path, x: "kernel" in path to quantize smaller ones'
        )
    arrays = [
        _quantized(*each, bits, group_size) if is_chosen else each[1]
        for each, is_chosen in zip(given, chosen, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def dequantize(tree: PyTree) -> PyTree:
    """Replaces each ``qwix.QArray`` of a tree by its array, in the dtype of its scales; returns a
    tree without quantized arrays unchanged.

    The arrays keep the sharding of the codes. At the start of a function under ``jax.jit`` this
    lets the function take quantized parameters.

    Example:
      >>> quantized = quantize_weights({"kernel": jnp.full((128, 128), 3.0)})
      >>> dequantize(quantized)["kernel"].dtype
      dtype('float32')
    """
    if not any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized))):
        return tree
    return jax.tree.map(
        lambda x: _dequantized(x) if is_quantized(x) else x, tree, is_leaf=is_quantized
    )


def is_quantized(x: object) -> bool:
    """Returns whether a node of a tree is a quantized array."""
    qwix = sys.modules.get("qwix")  # no array is quantized before someone imports it
    return qwix is not None and isinstance(x, qwix.QArray)


@functools.partial(jax.jit, inline=compat.INLINE)
def _dequantized(array: qwix.QArray) -> jax.Array:
    import qwix

    if array.qtype != "nf4":
        return qwix.dequantize(array)
    # qwix looks up a vector of all codes, which mixes layers and shards.
    values = _nf4_values().at[array.qvalue].get(mode="promise_in_bounds").astype(array.scale.dtype)
    split = [n for sizes in _tiles(array) for n in sizes]
    return (values.reshape(split) * _spread(array.scale)).reshape(array.shape)


def _tiles(array: qwix.QArray) -> list[tuple[int, int]]:
    """Returns for each dimension the number of its scales, and of the elements that share one."""
    return [(n, size // n) for n, size in zip(array.scale.shape, array.shape, strict=True)]


def _spread(scale: jax.Array) -> jax.Array:
    """Returns scales with a dimension of size 1 after each, for the elements that share one."""
    return scale.reshape([n for size in scale.shape for n in (size, 1)])


def _nf4_values() -> jax.Array:
    """Returns the 16 values of nf4 codes, ascending."""
    import qwix

    with jax.ensure_compile_time_eval():
        codes = jnp.arange(16).astype(jnp.uint4)
        return qwix.dequantize(qwix.QArray(codes, jnp.ones(16), None, "nf4"))


def _check(bits: Bits, group_size: int | None) -> None:
    is_size = isinstance(group_size, int) and not isinstance(group_size, bool) and group_size > 0
    if isinstance(bits, bool) or bits not in _QTYPES or not (group_size is None or is_size):
        raise ValueError(
            f"quantize_weights: bits={bits!r}, group_size={group_size!r}: pass bits=8, bits=4 or "
            'bits="nf4", and a group_size above 0, such as 64, or None for one scale an output'
        )


def _choose(path: str, x: Any, stacked: bool, select: Select | None) -> bool:
    if is_quantized(x):
        raise ValueError(
            f"quantize_weights: {path} is quantized already, to {x.qvalue.dtype}: pass the "
            "original parameters, or zerojax.dequantize(params)"
        )
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return False
    if select is None:
        return is_floating(x) and is_matrix(path, x, stacked)
    if not select(path, x):
        return False
    if not is_floating(x) or len(x.shape) - stacked < 2:
        layers = " (the first holds layers)" if stacked else ""
        raise TypeError(
            f"quantize_weights: select returns True for {path}, {x.dtype}{list(x.shape)}{layers}: "
            "select only floating matrices and stacks of matrices"
        )
    return True


def _quantized(path: str, x: Any, stacked: bool, bits: Bits, group_size: int | None) -> qwix.QArray:
    at_rest = unwrap_stored(x)
    sharding = getattr(at_rest, "sharding", None)
    sharding = sharding if isinstance(sharding, NamedSharding) else None
    grid = Grid(bits, input_dimension(x.shape, stacked), group_size)
    if group_size is not None:
        _check_groups(path, x, at_rest, grid, sharding)
    if isinstance(x, jax.core.Tracer):
        return grid.quantized(x)
    abstract = jax.eval_shape(grid.quantized, jax.ShapeDtypeStruct(x.shape, x.dtype))
    shardings = None if sharding is None else grid.shardings(sharding, len(x.shape))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.tree.map(_with_sharding, abstract, grid.like(*(shardings or [x.sharding] * 2)))
    if shardings is None:
        return _run(at_rest, grid, None)
    on_device = tuple(each.with_memory_kind(DEVICE) for each in shardings)
    stored = _run(jax.device_put(at_rest, on_device[0]), grid, on_device)
    stored = jax.device_put(stored, grid.like(*shardings))
    return jax.tree.map(lambda y, like: user_leaf(y, like.shape), stored, abstract)


def _with_sharding(x: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _run(x: jax.Array, grid: Grid, shardings: tuple[Sharding, Sharding] | None) -> qwix.QArray:
    array = grid.quantized(x)
    if shardings is None:
        return array
    constrained: qwix.QArray = jax.lax.with_sharding_constraint(array, grid.like(*shardings))
    return constrained


def _check_groups(
    path: str, x: Shaped, at_rest: Shaped, grid: Grid, sharding: NamedSharding | None
) -> None:
    """Raises ValueError unless groups divide the inputs of an array, and those of each shard."""
    d, asked = grid.dimension, grid.group_size
    assert asked is not None
    shard = at_rest.shape[d] if sharding is None else sharding.shard_shape(tuple(at_rest.shape))[d]
    common = math.gcd(shard, x.shape[d])
    if common % asked:
        holder = "" if shard == x.shape[d] else f", {shard} on each device"
        raise ValueError(
            f"quantize_weights: group_size={asked} does not divide dimension {d} of {path} "
            f"{tuple(x.shape)}{holder}: write group_size={math.gcd(common, asked)} or another "
            f"divisor of {common}, or None"
        )


def check_trainable(name: str, params: PyTree) -> None:
    """Raises TypeError if a step, of this name, would train a quantized array."""
    for path, x in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        if is_quantized(x):
            raise TypeError(f"{name}: params{jax.tree_util.keystr(path)} {_REMEDY}")


_REMEDY = (
    "is quantized, and cannot be trained: train the original state, and pass "
    "zerojax.quantize_weights(state) only to zero.evaluate; keep a quantized base of adapters "
    "in another field of the state"
)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TypeError(f"apply_gradients: params {_REMEDY}")


_NO_OPTIMIZER = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), _refuse)
