"""Keys and values that a decoder keeps between tokens, in flax's collection "cache".

A decoder of `zerojax.models` called with `positions` int [B, T] writes the keys and values of its
tokens into the cache. A call without a cache creates one for its tokens; a call with several tokens
writes the start of each row, positions 0 ... T - 1; a call with one token writes each row's
position, and attends to the positions up to it.

>>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
>>> model, rows = GPT(GPTConfig(**SIZES["tiny"])), jnp.ones((2, 9), jnp.int32)
>>> positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
>>> variables = jax.eval_shape(model.init, jax.random.key(0), rows, positions=positions)
>>> variables["cache"]["h_0"]["attn"]["key"].shape
(2, 9, 2, 16)

Shapes: B batch, T queries, S positions of the cache, H heads, G key and value heads, d features of
a head.
"""

import jax
from flax import linen as nn
from jax import lax

from zerojax.models.blocks import Attention

COLLECTION = "cache"


def attend_cached(
    module: nn.Module,
    attention: Attention,
    with_positions: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """Computes causal attention of q [B, T, H, d] to k and v [B, T, G, d] and to cached ones.

    Args:
      module: The attention's module, whose variables "key" and "value" [B, S, G, d] are the cache.
      attention: The attention of the start of rows, to k and v.
      with_positions: The attention of one token to the cache; takes the keyword `positions`.
      q, k, v: Queries, keys and values of the tokens.
      positions: int [B, T].

    Returns:
      [B, T, H, d].
    """
    exists = module.has_variable(COLLECTION, "key")
    both = [
        module.variable(COLLECTION, name, lambda x=x: x) for name, x in (("key", k), ("value", v))
    ]
    if not exists:
        return attention(q, k, v)
    one = q.shape[1] == 1
    for cached, new in zip(both, (k, v), strict=True):
        new = new.astype(cached.value.dtype)
        if one:
            write = jax.vmap(lambda row, x, at: lax.dynamic_update_slice_in_dim(row, x, at, 0))
            cached.value = write(cached.value, new, positions[:, 0])
        else:
            cached.value = lax.dynamic_update_slice_in_dim(cached.value, new, 0, 1)
    if not one:
        return attention(q, k, v)
    keys, values = (cached.value.astype(q.dtype) for cached in both)
    return with_positions(q, keys, values, positions=positions)


def check_cached(
    attention_mask: jax.Array | None, targets: jax.Array | None, num_labels: int | None
) -> None:
    """Rejects arguments of a decoder that have no meaning beside `positions`.

    Raises:
      ValueError: There are a mask, targets or labels.
    """
    given = {"attention_mask": attention_mask, "targets": targets, "num_labels": num_labels}
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name} beside positions: a decoder with a cache takes rows that start in the "
                "first column, and returns logits; leave one of the two out"
            )
