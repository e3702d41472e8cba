"""Attention: a choice among the kernels of other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tokamax_gpu
from pallas_kernels.attention.plain import plain
from pallas_kernels.attention.seen import Seen
from pallas_kernels.dispatch import Target, target

NAME = "attention"
_BEFORE_AMPERE = ("Tesla", "Quadro", "TITAN", "GTX", "RTX 20", "NVIDIA T")
_CHOICES = "there are None, 'mosaic_gpu', 'cudnn' and 'xla'"


def attention(
    q: jax.typing.ArrayLike,
    k: jax.typing.ArrayLike,
    v: jax.typing.ArrayLike,
    *,
    bias: jax.typing.ArrayLike | None = None,
    mask: jax.typing.ArrayLike | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sliding_window: int | None = None,
    segment_ids: jax.typing.ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Computes attention of each head; groups of query heads may share keys and values.

    .. math:: \mathrm{softmax}(s \, q k^\top + b) \, v

    Source: Vaswani et al., arXiv:1706.03762; grouped heads, Ainslie et al., arXiv:2305.13245.
    ``"mosaic_gpu"`` is tokamax's kernel, ``"cudnn"`` and ``"xla"`` are
    :func:`jax.nn.dot_product_attention`. Only ``"xla"`` stores the [batch, heads, queries, keys]
    matrix in memory. ``"mosaic_gpu"`` gives its result, and the softmax sums that the backward pass
    needs, the name ``"attention"`` for ``jax.checkpoint``'s policies.

    A query whose keys are all excluded by ``mask`` has no softmax: its result is the mean of ``v``
    by ``"xla"`` and 0 by ``"mosaic_gpu"``, so exclude such queries from a loss.

    Args:
      q: floats [batch, queries, heads, d].
      k, v: floats of the same dtype, [batch, keys, key heads, d]; ``heads`` is a multiple of
        ``key heads``, and consecutive heads of ``q`` share a key head.
      bias: :math:`b`, floats, broadcast to [batch, heads, queries, keys]. ``"cudnn"`` rounds it to
        the dtype of ``q``.
      mask: bool, broadcast to the same shape; False excludes a key.
      is_causal: whether query i attends only to keys 0 to i.
      scale: :math:`s`, by default :math:`1 / \sqrt{d}`.
      sliding_window: the number of most recent keys, including key i, to which query i attends;
        needs ``is_causal``.
      segment_ids: ints [batch, length] of packed sequences, with as many queries as keys: a
        sequence is a run of equal ids, and its queries attend only to its keys. ``"mosaic_gpu"``
        needs no [batch, queries, keys] mask for them.
      dropout_rate: the fraction of softmax weights that become 0; the others are divided by the
        remaining fraction. Only ``"xla"`` supports dropout.
      dropout_key: a key of ``jax.random``; needed for a rate above 0.
      implementation: None chooses the first that the device and these arguments allow:
        ``"mosaic_gpu"`` on NVIDIA GPUs since Hopper if tokamax is installed (bf16 or fp16; d up to
        256), ``"cudnn"`` since Ampere if JAX finds cuDNN (bf16 or fp16; d a multiple of 8, up to
        128, since Hopper 256), else ``"xla"``.

    Returns:
      An array like ``q``.

    Raises:
      ValueError: shapes do not match; the implementation is unknown, does not work on this device,
        or does not support an argument.
      TypeError: dtypes differ, or are not floats (for the mask: bool; for the ids: ints).

    Example:
      >>> import jax.numpy as jnp
      >>> q, k = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 2, 1, 8))
      >>> attention(q, k, k, is_causal=True).shape
      (1, 2, 4, 8)
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _check(q, k, v)
    bias = None if bias is None else _check_over("bias", jnp.asarray(bias), q, k, jnp.floating)
    mask = None if mask is None else _check_over("mask", jnp.asarray(mask), q, k, jnp.bool_)
    ids = None if segment_ids is None else jnp.asarray(segment_ids)
    _check_seen(q, k, is_causal, sliding_window, ids)
    _check_dropout(dropout_rate, dropout_key)
    seen = Seen(is_causal, sliding_window, ids, q.shape[1], k.shape[1])

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # cuDNN broadcasts only over batch and heads.
        length = (q.shape[1], k.shape[1])
        b, m = (
            None if x is None else jnp.broadcast_to(x, (*x.shape[:2], *length))
            for x in (None if bias is None else bias.astype(q.dtype), seen.mask(mask))
        )
        return jax.nn.dot_product_attention(
            q, k, v, b, m, is_causal=is_causal, scale=scale, implementation="cudnn"
        )

    device = target()
    refusals: dict[str, Callable[[], str | None]] = {
        "mosaic_gpu": lambda: tokamax_gpu.refusal(device, q, dropout_rate),
        "cudnn": lambda: _refusal(device, cudnn, dropout_rate, q, k, v),
        "xla": lambda: None,
    }
    if implementation is None:
        implementation = next(name for name, refusal in refusals.items() if refusal() is None)
    elif implementation not in refusals:
        raise ValueError(f"{NAME}: unknown implementation {implementation!r}; {_CHOICES}.")
    elif (reason := refusals[implementation]()) is not None:
        raise ValueError(
            f"{NAME}: implementation {implementation!r} {reason}. Leave it None; {_CHOICES}."
        )
    if implementation == "mosaic_gpu":
        return tokamax_gpu.attention(q, k, v, bias, mask, seen, scale)
    if implementation == "cudnn":
        return cudnn(q, k, v)
    keywords: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if dropout_rate:
        return plain(q, k, v, bias, seen.mask(mask), **keywords, rate=dropout_rate, key=dropout_key)
    return _xla(q, k, v, bias, seen.mask(mask), **keywords)


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, *others: Any, **keywords: Any) -> jax.Array:
    operands = [q, k, v]
    if target().platform == "cpu" and q.dtype == jnp.float16:
        # XLA has no float16 matrix products on CPUs.
        operands = [x.astype(jnp.float32) for x in operands]
    out = jax.nn.dot_product_attention(*operands, *others, **keywords, implementation="xla")
    return out.astype(q.dtype)


def _refusal(
    at: Target, cudnn: Callable[..., jax.Array], dropout: float, *arrays: jax.Array
) -> str | None:
    """Returns the reason why cuDNN cannot run this attention, or None if it can."""
    is_ampere_or_newer = "NVIDIA" in at.kind and not any(name in at.kind for name in _BEFORE_AMPERE)
    if at.platform != "gpu" or not is_ampere_or_newer:
        return f"needs an NVIDIA GPU, Ampere or newer, and this runs on {at.platform} ({at.kind})"
    if arrays[0].dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, and q, k and v are {arrays[0].dtype}"
    if dropout:
        return "has no dropout here"
    try:
        # JAX checks what cuDNN supports; gradients have stricter requirements.
        jax.eval_shape(lambda *x: jax.vjp(cudnn, *x)[0], *arrays)
    except (NotImplementedError, RuntimeError) as error:
        return f"does not work here: {error}".rstrip(".")
    return None


def _check(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, no floats")
        if x.dtype != q.dtype:
            raise TypeError(f"{NAME}: q is {q.dtype} and {name} {x.dtype}; cast one to the other")
        if x.ndim != 4 or not x.size:
            raise ValueError(
                f"{NAME}: {name} has shape {x.shape}, not [batch, length, heads, d], none of them 0"
            )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{NAME}: q has shape {q.shape}, k {k.shape} and v {v.shape}; k and v have to be "
            "alike, and have q's batch and d"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{NAME}: q has {q.shape[2]} heads, no multiple of the {k.shape[2]} of k and v"
        )


def _check_over(name: str, x: jax.Array, q: jax.Array, k: jax.Array, kind: Any) -> jax.Array:
    """Checks ``x`` and reshapes it to four axes."""
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(
            f"{NAME}: {name} has dtype {x.dtype}; a mask is of bool, and what is added is a bias"
        )
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    shape = (1,) * (4 - x.ndim) + x.shape
    if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, expected, strict=True)):
        raise ValueError(
            f"{NAME}: {name} has shape {x.shape}, which does not broadcast to [batch, heads, "
            f"queries, keys] = {expected}"
        )
    return x.reshape(shape)


def _check_seen(
    q: jax.Array, k: jax.Array, is_causal: bool, window: int | None, ids: jax.Array | None
) -> None:
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"{NAME}: sliding_window must be a positive int, not {window!r}")
        if not is_causal:
            raise ValueError(f"{NAME}: sliding_window only looks back; add is_causal=True")
    if ids is None:
        return
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{NAME}: segment_ids has dtype {ids.dtype}, no ints")
    if ids.shape != q.shape[:2] or q.shape[1] != k.shape[1]:
        raise ValueError(
            f"{NAME}: segment_ids has shape {ids.shape}, and q [batch, length] {q.shape[:2]}, k "
            f"{k.shape[:2]}; all three have to be the same"
        )


def _check_dropout(rate: float, key: jax.Array | None) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ValueError(f"{NAME}: dropout_rate must be in [0, 1), not {rate!r}")
    if rate and key is None:
        raise ValueError(f"{NAME}: dropout_rate {rate} needs a dropout_key")
