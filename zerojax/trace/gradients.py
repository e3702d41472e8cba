"""Drop-in replacements for ``jax.value_and_grad`` and ``jax.grad`` that apply the loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from zerojax.trace.marks import LOSS, SEED, mark
from zerojax.xla.types import PyTree


def value_and_grad(
    fun: Callable[..., PyTree],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: jax.typing.ArrayLike | None = None,
    **options: object,
) -> Callable[..., PyTree]:
    """Replaces ``jax.value_and_grad``, or ``nnx.value_and_grad`` if an argument is an NNX module.

    In a step decorated with fp16 on, the loss is multiplied by the state's loss scale before the
    backward pass. The value is the loss itself; the gradient carries the scale, and the optimizer
    divides by it. So clipping, decay and noise belong in the optax chain, and the norm is read
    from :func:`zerojax.telemetry`. Elsewhere, without ``loss_scale``, the results are jax's own.

    Args:
      fun, argnums, has_aux: See ``jax.value_and_grad``.
      loss_scale: Scalar; the scale to use outside a decorated step, with an optimizer that
        :func:`zerojax.wrap` gave a ``LossScale``: ``zerojax.telemetry(state)["loss_scale"]``.
      **options: Further arguments of ``jax.value_and_grad``.

    Example:
      >>> import jax.numpy as jnp
      >>> value, grad = value_and_grad(lambda w: 3.0 * w, loss_scale=8.0)(jnp.float32(2.0))
      >>> float(value), float(grad)
      (6.0, 24.0)
    """

    @functools.wraps(fun)
    def scaled(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        out = fun(*args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        if not jnp.issubdtype(jnp.result_type(loss), jnp.inexact):
            return loss, (loss, aux)  # for jax to refuse
        seed = mark(jnp.ones((), jnp.float32), SEED)
        scale = seed if loss_scale is None else jnp.asarray(loss_scale, jnp.float32)
        # In float32: a loss in fp16 would overflow here.
        return mark(loss, LOSS) * scale, (loss, aux)

    @functools.wraps(fun)
    def wrapped(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        inputs = jax.tree.leaves((args, kwargs), is_leaf=_is_module)
        modules = any(map(_is_module, inputs))
        transform: Callable[..., Callable[..., PyTree]] = (
            nnx.value_and_grad if modules else jax.value_and_grad
        )
        # The value that is differentiated has the scale; the loss itself returns beside it.
        (_, (value, aux)), grads = transform(scaled, argnums=argnums, has_aux=True, **options)(
            *args, **kwargs
        )
        return ((value, aux) if has_aux else value), grads

    return wrapped


def _is_module(x: object) -> bool:
    return isinstance(x, nnx.Module)


def grad(
    fun: Callable[..., PyTree],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    *,
    loss_scale: jax.typing.ArrayLike | None = None,
    **options: object,
) -> Callable[..., PyTree]:
    """Replaces ``jax.grad``; see :func:`value_and_grad`.

    Example:
      >>> import jax.numpy as jnp
      >>> float(grad(lambda w: 3.0 * w)(jnp.float32(2.0)))
      3.0
    """
    with_value = value_and_grad(fun, argnums, has_aux, loss_scale=loss_scale, **options)

    @functools.wraps(fun)
    def wrapped(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    r"""Returns the weighted mean of per-token losses.

    .. math:: \ell = \sum_i w_i v_i \; / \sum_i w_i

    The mean is computed in float32 at least, and is 0 if all weights are 0. A value with weight 0
    may be inf or NaN, which reaches neither the mean nor its gradient.

    With accumulation in a decorated step, the mean is over the global batch, whatever share of
    its tokens each micro-batch masks; so is ``jnp.sum(values * mask) / jnp.sum(mask)``. (A mean
    of the micro-batches' means, as in DeepSpeed, is a different loss.)

    Args:
      values: [...], of any shape.
      weights: Weights that broadcast to the shape of ``values``, such as a mask.

    Returns:
      float [].

    Raises:
      ValueError: The weights do not broadcast.

    Example:
      >>> import jax.numpy as jnp
      >>> float(weighted_mean(jnp.array([1.0, 5.0, 9.0]), jnp.array([1, 1, 0])))
      3.0
    """
    # Counts of tokens are exact to 2,048 in float16, and to 256 in bfloat16.
    wide = jnp.promote_types(jnp.result_type(values), jnp.float32)
    values = jnp.asarray(values, wide)
    weights = jax.lax.stop_gradient(jnp.asarray(weights, wide))
    dims = zip(weights.shape[::-1], values.shape[::-1], strict=False)
    if weights.ndim > values.ndim or any(w not in (1, v) for w, v in dims):
        raise ValueError(
            f"weighted_mean: weights {weights.shape} do not broadcast to {values.shape}; write "
            "weights[:, None]"
        )
    weights = jnp.broadcast_to(weights, values.shape)
    total = jnp.sum(weights)
    # A masked value may be anything, inf and NaN too.
    part = jnp.where(weights == 0, 0, values) * weights
    return jnp.sum(part) / jnp.where(total == 0, 1, total)
