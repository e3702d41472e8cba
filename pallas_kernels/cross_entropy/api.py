"""Fused projection onto a vocabulary and softmax cross-entropy, without storing all logits."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import chunks, mosaic_gpu, reference
from pallas_kernels.dispatch import choose
from pallas_kernels.varying import alike

NAME = "softmax_cross_entropy"

_XLA = chunks.Rows(reference.statistics, reference.gradient)
_MOSAIC_GPU = chunks.Rows(mosaic_gpu.statistics, mosaic_gpu.gradient)


def softmax_cross_entropy(
    hidden: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    labels: jax.typing.ArrayLike,
    *,
    bias: jax.typing.ArrayLike | None = None,
    weight_layout: Literal["vocabulary_first", "vocabulary_last"] = "vocabulary_first",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    r"""Computes each token's cross-entropy from logits that are never all in memory at once.

    .. math::

        z = W h + b, \quad \ell = \log \sum_j e^{z_j}, \quad
        \mathrm{loss} = \ell - (1 - s) z_y - \frac{s}{v} \sum_j z_j + \zeta \ell^2

    Source: LigerFusedLinearCrossEntropyLoss (``fused_linear_cross_entropy.py``), Hsu et al.,
    arXiv:2410.10989; :math:`\zeta` is from Chowdhery et al., arXiv:2204.02311.

    Both passes process tokens in chunks. Besides the arguments, the forward pass saves one float32
    number per token, :math:`\ell`; the backward pass recomputes each chunk's logits (8 t d v
    operations in total, 6 t d v if all logits were saved). Logits of 1e4 have an error of 5e-4, and
    so have :math:`\ell` and the gradients. cuBLAS computes matrix products in the arguments' dtype;
    logits, sums and the gradient of ``weight`` are float32. With ``"mosaic_gpu"`` a kernel reads
    each chunk's logits once, where XLA reads them twice; XLA still handles vocabularies of fewer
    than 128 words.

    Chunks divide the tokens of one device: if tokens are sharded, call this function within
    ``jax.shard_map``.

    Args:
      hidden: :math:`h`, floats [..., d].
      weight: :math:`W`, floats of the same dtype, [v, d] (flax's ``Embed``, torch's ``Linear``), or
        [d, v] (flax's ``Dense`` and ``Linear``) with ``weight_layout="vocabulary_last"``.
      labels: :math:`y`, integers [...]. A label that is neither in [0, v) nor ``ignore_index``
        turns the token's loss and all gradients into NaN, because ``jit`` cannot raise an error.
      bias: :math:`b`, floats [v].
      weight_layout: the order of the axes of ``weight``.
      ignore_index: the label of tokens whose loss, and contribution to every gradient, is 0.
      label_smoothing: :math:`s`, from 0 to 1.
      z_loss: :math:`\zeta`, 0 or more.
      chunk_tokens: tokens of a chunk. With None, a chunk's logits have about as many elements as
        ``hidden``: t d / v tokens, rounded up to a power of two, at least 128.
      implementation: None, ``"mosaic_gpu"`` or ``"xla"``, see :func:`dispatch.choose`.

    Returns:
      The losses per token, float32 [...], without a mean.

    Raises:
      ValueError: shapes do not match, a number is out of range, or the implementation does not
        work on this device.
      TypeError: labels are not integers, or the other arrays are not floats, or ``hidden`` and
        ``weight`` have different dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> h, w = jnp.ones((3, 2)), jnp.eye(4, 2)
      >>> softmax_cross_entropy(h, w, jnp.array([0, 3, -100])).round(3)
      Array([1.006, 2.006, 0.   ], dtype=float32)
    """
    hidden, weight, labels = jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(labels)
    bias = None if bias is None else jnp.asarray(bias)
    if weight_layout not in ("vocabulary_first", "vocabulary_last"):
        raise ValueError(
            f"{NAME}: unknown weight_layout {weight_layout!r}; there are 'vocabulary_first' for "
            "[v, d] and 'vocabulary_last' for [d, v]."
        )
    vocabulary_last = weight_layout == "vocabulary_last"
    _check(hidden, weight, labels, bias, vocabulary_last)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{NAME}: label_smoothing is {label_smoothing}, not from 0 to 1")
    if not z_loss >= 0:
        raise ValueError(f"{NAME}: z_loss is {z_loss}, not 0 or more")
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or chunk_tokens < 1):
        raise ValueError(f"{NAME}: chunk_tokens is {chunk_tokens!r}, not a positive int or None")
    vocabulary = weight.shape[vocabulary_last]
    is_large = vocabulary >= mosaic_gpu.SMALLEST
    chosen = choose(NAME, implementation)
    settings = chunks.Settings(
        rows=_MOSAIC_GPU if chosen == "mosaic_gpu" and is_large else _XLA,
        chunk=chunk_tokens or chunks.chunk_of(labels.size, hidden.shape[-1], vocabulary),
        vocabulary_last=vocabulary_last,
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
    )
    flat, classes = hidden.reshape(-1, hidden.shape[-1]), labels.astype(jnp.int32).reshape(-1)
    losses = chunks.losses(settings, *alike(flat, weight, classes, bias))
    return losses.reshape(labels.shape)


def _check(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, bias: jax.Array | None, last: bool
) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{NAME}: labels has dtype {labels.dtype}; classes are integers")
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{NAME}: {name} has dtype {x.dtype}, no floats")
    if hidden.dtype != weight.dtype:
        raise TypeError(
            f"{NAME}: hidden is {hidden.dtype} and weight {weight.dtype}; cast one to the other"
        )
    if hidden.ndim < 1 or labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{NAME}: hidden has shape {hidden.shape} and labels {labels.shape}; "
            "labels are hidden's shape without its last axis"
        )
    if weight.ndim != 2 or weight.shape[not last] != hidden.shape[-1]:
        expected, other_layout = (
            ("[d, v]", "vocabulary_first") if last else ("[v, d]", "vocabulary_last")
        )
        is_transposed = weight.ndim == 2 and weight.shape[int(last)] == hidden.shape[-1]
        remedy = f". Pass weight_layout={other_layout!r}" if is_transposed else ""
        raise ValueError(
            f"{NAME}: hidden has shape {hidden.shape} and weight {weight.shape}, which is not "
            f"{expected} with d = {hidden.shape[-1] if hidden.ndim else None}{remedy}"
        )
    if bias is not None and bias.shape != (weight.shape[last],):
        raise ValueError(
            f"{NAME}: bias has shape {bias.shape}, not [v] with v = {weight.shape[last]}"
        )
    if not hidden.size or not weight.size:
        raise ValueError(
            f"{NAME}: hidden has shape {hidden.shape} and weight {weight.shape}; nothing is in them"
        )
