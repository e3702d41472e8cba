"""Layers that DeBERTa and BART share: attention by its scores, and blocks unrolled or stacked.

Shapes: B batch, T queries, S keys, H heads, d features of a head, L blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from zerojax.models.loss import widen

Fields = tuple[Any, ...]


def attend(
    scores: jax.Array,
    values: jax.Array,
    mask: jax.Array | None = None,
    dropout: Callable[..., jax.Array] = lambda x: x,
) -> jax.Array:
    """softmax(scores) values for scores [B, H, T, S] and values [B, S, H, d]: [B, T, H, d].

    The softmax is in fp32 or wider. A query reads where `mask` (bool, broadcast to [B, H, T, S]) is
    True; one that may read nowhere reads everywhere.

    >>> scores, values = jnp.zeros((1, 1, 1, 3)), jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> attend(scores, values, jnp.array([True, True, False])).item()      # the mean of 0 and 1
    0.5
    """
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(widen(scores)).astype(values.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", dropout(weights), values)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., D] as [..., H, d]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def run_blocks(
    block: type[nn.Module],
    fields: Fields,
    x: jax.Array,
    *inputs: Any,
    layers: range,
    name: str,
    scan: bool,
    remat: bool,
    each: Any = None,
) -> tuple[jax.Array, Any]:
    """x after the blocks, and what each of them returned beside it. Called within a module.

    Args:
      block: Its `__call__(x, each, *inputs)` returns x and something of its own.
      fields: What each is constructed of.
      x: The first one's input.
      inputs: What all read alike.
      layers: Numbers of the blocks; unrolled, they are part of the names.
      name: `name` of the stack with leaves [L, ...], `name_0`, `name_1`, ... of unrolled blocks.
      scan: Whether the blocks are stacked, and one is compiled in place of all.
      remat: Whether a block keeps its input only and computes the rest again in the backward pass.
      each: What is each block's own: leaves [L, ...] of a stack, a sequence of unrolled ones.

    Returns:
      The same as `each` for what the blocks returned.
    """
    if remat:
        # XLA merges nothing across the layers of a scan, so that the barrier would only cost.
        block = nn.remat(block, prevent_cse=not scan)
    if scan:
        stack = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, *(nn.broadcast for _ in inputs)),
            length=len(layers),
        )
        return stack(*fields, name=name)(x, each, *inputs)
    own: Sequence[Any] = each or [None] * len(layers)
    returned = []
    for i, mine in zip(layers, own, strict=True):
        x, other = block(*fields, name=f"{name}_{i}")(x, mine, *inputs)
        returned.append(other)
    return x, returned
