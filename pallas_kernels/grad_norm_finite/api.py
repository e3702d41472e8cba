"""Norm and finiteness of all gradients in one pass over memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.elementwise import SMALLEST
from pallas_kernels.grad_norm_finite import mosaic_gpu, reference

NAME = "grad_norm_finite"


class NormFinite(NamedTuple):
    """Sum of squares of all elements, float32 [], and whether all elements are finite, bool []."""

    square_sum: jax.Array
    finite: jax.Array


def grad_norm_finite(grads: Any, *, implementation: str | None = None) -> NormFinite:
    r"""Computes the sum of squares :math:`\sum_i g_i^2` and the finiteness of a gradient tree.

    The two are separate because squares may overflow even if the gradients do not. Source:
    DeepSpeed's ``CheckOverflow`` and ``get_global_norm`` (runtime/utils.py), which take a pass
    each.

    With ``"mosaic_gpu"``, up to 8 leaves share a launch; XLA still handles leaves of fewer than 128
    elements. Within ``shard_map`` the results are those of the shards; add and ``and`` them over
    the devices.

    Args:
      grads: tree of floating-point arrays; summed in float32.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Raises:
      TypeError: a leaf does not have a float dtype.
      ValueError: the implementation does not work on this device.

    Example:
      >>> import jax.numpy as jnp
      >>> grad_norm_finite({"w": jnp.array([3.0, 4.0])})
      NormFinite(square_sum=Array(25., dtype=float32), finite=Array(True, dtype=bool))
    """
    pairs = jax.tree_util.tree_flatten_with_path(grads)[0]
    for path, x in pairs:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            leaf_name = jax.tree_util.keystr(path)
            raise TypeError(f"{NAME}: grads{leaf_name} has dtype {x.dtype}; gradients are floats")
    leaves = [x for _, x in pairs]
    chosen = choose(NAME, implementation)
    smallest = SMALLEST if chosen == "mosaic_gpu" else float("inf")
    large = [x for x in leaves if x.size >= smallest]
    partials = [reference.of_leaf(x) for x in leaves if x.size < smallest]
    partials += [mosaic_gpu.of_leaves(large)] if large else []
    total, finite = jnp.zeros((), jnp.float32), jnp.asarray(True)
    for square_sum, leaf_finite in partials:
        total, finite = total + square_sum, finite & leaf_finite
    return NormFinite(total, finite)
