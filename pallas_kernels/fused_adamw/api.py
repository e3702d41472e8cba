"""AdamW: unscaling, clipping, moments, decay, update and the low-precision copy in one pass."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import choose
from pallas_kernels.elementwise import SMALLEST
from pallas_kernels.fused_adamw import mosaic_gpu, reference

NAME = "fused_adamw"


class AdamWResult(NamedTuple):
    """State after the update, trees like the parameters; ``copy`` is None if not requested."""

    params: Any
    mu: Any
    nu: Any
    copy: Any


def fused_adamw(
    grads: Any,
    params: Any,
    mu: Any,
    nu: Any,
    *,
    count: jax.typing.ArrayLike,
    learning_rate: jax.typing.ArrayLike,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: jax.typing.ArrayLike = 0.0,
    decoupled: bool = True,
    scale: jax.typing.ArrayLike = 1.0,
    run: jax.typing.ArrayLike = True,
    copy_dtype: Any = None,
    implementation: str | None = None,
) -> AdamWResult:
    r"""Performs a step of AdamW, or of Adam with L2 decay, in place if the caller donates.

    .. math::

        g' = s g \; [+ \lambda p], \quad
        \mu' = \beta_1 \mu + (1 - \beta_1) g', \quad
        \nu' = \beta_2 \nu + (1 - \beta_2) g'^2, \\
        p' = p - \eta \left(\frac{\mu' / (1 - \beta_1^t)}
            {\sqrt{\nu' / (1 - \beta_2^t)} + \epsilon} \; [+ \lambda p]\right)

    Source: Loshchilov and Hutter, arXiv:1711.05101; the decay is the second bracket with
    ``decoupled``, else the first (DeepSpeed's FusedAdam, ``adam_w_mode``). The computation is in
    float32.

    With ``"mosaic_gpu"``, up to 8 leaves of the same dtypes share a launch; XLA still handles
    leaves of fewer than 128 elements. jax 0.10 cannot overwrite arguments, so that its results have
    separate buffers.

    Args:
      grads: tree of floating-point arrays.
      params, mu, nu: trees of floating-point arrays, with the structure and shapes of ``grads``.
      count: :math:`t`, int []: updates including this one, from 1.
      learning_rate, b1, b2, eps, weight_decay: :math:`\eta, \beta_1, \beta_2, \epsilon, \lambda`.
      decoupled: see the formula.
      scale: :math:`s`, the clipping factor divided by the loss scale.
      run: bool [], False to leave all arrays unchanged, as after an overflow.
      copy_dtype: the dtype of a copy of the new parameters, for the next forward pass; None for no
        copy.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Raises:
      ValueError: trees or shapes differ; the implementation does not work on this device.
      TypeError: an array does not have a float dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> p, g, zeros = jnp.ones(3), jnp.full(3, 0.5), jnp.zeros(3)
      >>> fused_adamw(g, p, zeros, zeros, count=1, learning_rate=0.1).params
      Array([0.9, 0.9, 0.9], dtype=float32)
    """
    leaves = _leaves(grads, params, mu, nu)
    chosen = choose(NAME, implementation)
    t = jnp.asarray(count, jnp.float32)
    b1, b2 = (jnp.asarray(b, jnp.float32) for b in (b1, b2))
    values = (scale, learning_rate, weight_decay, b1, b2, eps, 1 - b1**t, 1 - b2**t, run)
    scalars = [jnp.asarray(x, jnp.float32) for x in values]
    copy = None if copy_dtype is None else jnp.dtype(copy_dtype)
    new_leaves: list[list[jax.Array]] = [[] for _ in leaves]
    by_dtypes: dict[Any, list[int]] = defaultdict(list)
    for i, arrays in enumerate(leaves):
        if chosen == "mosaic_gpu" and arrays[0].size >= SMALLEST:
            by_dtypes[tuple(x.dtype for x in arrays)].append(i)
            continue
        updated = reference.update(scalars, arrays, decoupled)
        new_leaves[i] = [x.astype(old.dtype) for x, old in zip(updated, arrays[1:], strict=True)]
        new_leaves[i] += [] if copy is None else [updated[0].astype(copy)]
    for indices in by_dtypes.values():
        group = [leaves[i] for i in indices]
        group_results = mosaic_gpu.update(jnp.stack(scalars), group, decoupled, copy)
        for i, results in zip(indices, group_results, strict=True):
            new_leaves[i] = results
    tree = jax.tree.structure(params)
    columns = [jax.tree.unflatten(tree, column) for column in zip(*new_leaves, strict=True)]
    return AdamWResult(*columns, *([None] if copy is None else []))


def _leaves(grads: Any, params: Any, mu: Any, nu: Any) -> list[list[jax.Array]]:
    """Returns the gradient, the parameter and the moments of each leaf."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    if not paths:
        raise ValueError(f"{NAME}: there are no parameters")
    columns = []
    for name, other in (("grads", grads), ("params", params), ("mu", mu), ("nu", nu)):
        structure: Any = jax.tree.structure(other)
        if structure != tree:
            raise ValueError(f"{NAME}: {name} is a tree {structure}, params one {tree}")
        columns.append([jnp.asarray(x) for x in jax.tree.leaves(other)])
        for (path, x), y in zip(paths, columns[-1], strict=True):
            leaf_name = name + jax.tree_util.keystr(path)
            if y.shape != jnp.shape(x):
                raise ValueError(
                    f"{NAME}: {leaf_name} has shape {y.shape}, the parameter {jnp.shape(x)}"
                )
            if not jnp.issubdtype(y.dtype, jnp.floating):
                raise TypeError(f"{NAME}: {leaf_name} has dtype {y.dtype}; only floats are updated")
    return [list(arrays) for arrays in zip(*columns, strict=True)]
