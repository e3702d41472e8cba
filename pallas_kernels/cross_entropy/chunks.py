"""Projection and cross-entropy, a chunk of tokens at a time, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.cross_entropy.reference import SKIP, Factors, Statistics
from pallas_kernels.varying import alike

SMALLEST = 128
"""Minimum tokens of a chunk, because matrix products of fewer do not fill a GPU."""
ALIGNED = 8
"""Multiple to which vocabularies are padded; other matrix products are slow on GPUs."""


class Rows(NamedTuple):
    """An implementation of :mod:`pallas_kernels.cross_entropy.reference`."""

    statistics: Callable[[jax.Array, jax.Array, int, bool], Statistics]
    gradient: Callable[[jax.Array, jax.Array, int, jax.Array, Factors, Any], jax.Array]


class Settings(NamedTuple):
    """Static arguments, see :func:`pallas_kernels.softmax_cross_entropy`."""

    rows: Rows
    chunk: int
    vocabulary_last: bool
    ignore_index: int
    label_smoothing: float
    z_loss: float


def chunk_of(tokens: int, width: int, vocabulary: int) -> int:
    """Returns the tokens of a chunk whose logits have about as many elements as ``hidden``.

    Example:
      >>> chunk_of(32768, 4096, 128256)
      2048
    """
    wanted = max(SMALLEST, -(-tokens * width // vocabulary))
    return min(tokens, 1 << (wanted - 1).bit_length())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses(
    settings: Settings,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Computes float32 [t] from hidden [t, d], weight [v, d] or [d, v], labels int32 [t], bias."""
    return _forward(settings, hidden, weight, labels, bias)[0]


def _forward(
    settings: Settings,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    smoothing = settings.label_smoothing
    padded_weight, padded_bias, vocabulary = _pad_vocabulary(settings, weight, bias)

    def of_chunk(_: None, chunk: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        h, y = chunk
        valid_labels = _valid_labels(settings, y, vocabulary)
        logits = _project(h, padded_weight, padded_bias, settings.vocabulary_last)
        lse, picked, total = settings.rows.statistics(
            logits, valid_labels, vocabulary, smoothing != 0
        )
        loss = lse - (1 - smoothing) * picked
        if total is not None:
            loss -= smoothing / vocabulary * total
        if settings.z_loss:
            loss += settings.z_loss * lse * lse
        skipped_loss = jnp.where(y == settings.ignore_index, 0, jnp.nan)
        # If lse itself were returned, XLA would run its kernel twice, for lse and for the loss.
        return None, tuple(
            jnp.where(valid_labels == SKIP, *x) for x in ((skipped_loss, loss), (0, lse))
        )

    with jax.named_scope("cross_entropy"):
        chunks = (_chunked(settings, hidden, 0), _chunked(settings, labels, settings.ignore_index))
        _, (token_losses, lse) = lax.scan(of_chunk, None, chunks)
        token_losses, lse = (x.reshape(-1)[: len(labels)] for x in (token_losses, lse))
    return token_losses, (hidden, weight, labels, bias, lse)


def _backward(
    settings: Settings, kept: tuple[Any, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array | None]:
    hidden, weight, labels, bias, lse = kept
    smoothing = settings.label_smoothing
    padded_weight, padded_bias, vocabulary = _pad_vocabulary(settings, weight, bias)

    def of_chunk(sums: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        d_weight, d_bias = sums
        h, y, chunk_lse, g = chunk
        valid_labels = _valid_labels(settings, y, vocabulary)
        g = jnp.where(valid_labels == SKIP, jnp.where(y == settings.ignore_index, 0, jnp.nan), g)
        logits = _project(h, padded_weight, padded_bias, settings.vocabulary_last)
        factors = Factors(
            probability=g * (1 + 2 * settings.z_loss * chunk_lse) if settings.z_loss else g,
            label=g * (1 - smoothing),
            # The smoothing term; in skipped rows g, which is 0, or NaN for an invalid label.
            uniform=jnp.where(valid_labels == SKIP, g, g * (smoothing / vocabulary)),
        )
        d = settings.rows.gradient(logits, valid_labels, vocabulary, chunk_lse, factors, h.dtype)
        operands = (h, d) if settings.vocabulary_last else (d, h)
        d_weight += _product(*operands, 0, 0)
        if d_bias is not None:
            d_bias += jnp.sum(d, axis=0, dtype=jnp.float32)
        d_h = _product(d, padded_weight, 1, settings.vocabulary_last)
        return (d_weight, d_bias), d_h.astype(h.dtype)

    with jax.named_scope("cross_entropy_backward"):
        chunks = (
            _chunked(settings, hidden, 0),
            _chunked(settings, labels, settings.ignore_index),
            _chunked(settings, lse, 0),
            _chunked(settings, cotangent, 0),
        )
        params = (padded_weight, padded_bias)
        zeros = [None if x is None else jnp.zeros(x.shape, jnp.float32) for x in params]
        sums: tuple[Any, ...] = tuple(alike(labels, *zeros)[1:])
        (d_weight, d_bias), d_hidden = lax.scan(of_chunk, sums, chunks)
    d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: len(hidden)]
    d_weight = d_weight[: weight.shape[0], : weight.shape[1]].astype(weight.dtype)
    if bias is not None:
        d_bias = d_bias[:vocabulary].astype(bias.dtype)
    return d_hidden, d_weight, None, d_bias


losses.defvjp(_forward, _backward)


def _project(
    hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, vocabulary_last: bool
) -> jax.Array:
    """Computes logits, float32 [t, v]."""
    contracting = ((1,), (0 if vocabulary_last else 1,))
    logits = lax.dot_general(
        hidden, weight, (contracting, ((), ())), preferred_element_type=jnp.float32
    )
    return logits if bias is None else logits + bias.astype(jnp.float32)


def _pad_vocabulary(
    settings: Settings, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, int]:
    """Pads weight and bias to a multiple of :data:`ALIGNED` words; also returns the vocabulary."""
    vocabulary = weight.shape[settings.vocabulary_last]
    if missing := -vocabulary % ALIGNED:
        padding = [(0, 0), (0, missing)] if settings.vocabulary_last else [(0, missing), (0, 0)]
        weight = jnp.pad(weight, padding)
        bias = None if bias is None else jnp.pad(bias, (0, missing))
    return weight, bias, vocabulary


def _valid_labels(settings: Settings, labels: jax.Array, vocabulary: int) -> jax.Array:
    """Replaces labels that are ignored or not in the vocabulary by :data:`SKIP`."""
    is_valid = (labels != settings.ignore_index) & (labels >= 0) & (labels < vocabulary)
    return jnp.where(is_valid, labels, SKIP)


def _chunked(settings: Settings, x: jax.Array, fill: int) -> jax.Array:
    """Splits x into [chunks, tokens of a chunk, ...], and pads the last chunk with ``fill``."""
    missing = -len(x) % settings.chunk
    if missing:
        x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return x.reshape(-1, settings.chunk, *x.shape[1:])


def _product(x: jax.Array, y: jax.Array, axis_x: int, axis_y: int) -> jax.Array:
    """Multiplies matrices over one axis of each, in float32."""
    return lax.dot_general(
        x, y, (((axis_x,), (axis_y,)), ((), ())), preferred_element_type=jnp.float32
    )
