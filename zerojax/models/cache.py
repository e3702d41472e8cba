"""Keys and values that a decoder keeps between tokens, in flax's collection "cache".

A decoder of `zerojax.models` called with `positions` int [B, T] writes the keys and values of its
tokens into the cache. A call without a cache creates one for its tokens; a call with several tokens
writes the start of each row, positions 0 ... T - 1; a call with one token writes each row's
position, and attends to the positions up to it.

An encoder-decoder has a method `encode(sources, mask)`, and a method `decode(targets, positions,
memory, mask)` that uses the cache so. The first call of `decode` takes the memory, and stores what
attention to it needs in the collection "memory", which later calls read.

>>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
>>> model, rows = GPT(GPTConfig(**SIZES["tiny"])), jnp.ones((2, 9), jnp.int32)
>>> positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
>>> variables = jax.eval_shape(model.init, jax.random.key(0), rows, positions=positions)
>>> variables["cache"]["h_0"]["attn"]["key"].shape
(2, 2, 9, 16)

Heads come before positions, as the products of attention read them: XLA for GPUs would otherwise
transpose the whole cache for each token.

Shapes: B batch, T queries, S positions of the cache, H heads, G key and value heads, d features of
a head.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from zerojax.models.blocks import Attention

COLLECTION = "cache"
MEMORY = "memory"

T = TypeVar("T")


def attend_cached(
    module: nn.Module | nnx.Module,
    attention: Attention,
    with_positions: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array | None,
) -> jax.Array:
    """Computes causal attention of q [B, T, H, d] to k and v [B, T, G, d] and to cached ones.

    Args:
      module: The attention's module, whose variables "key" and "value" [B, G, S, d] are the cache;
        in NNX `init_cache` creates them.
      attention: The attention of the start of rows, to k and v.
      with_positions: The attention of one token to the cache; takes the keyword `positions`.
      q, k, v: Queries, keys and values of the tokens.
      positions: int [B, T]; None for rows without a cache.

    Returns:
      [B, T, H, d].
    """
    if positions is None:
        return attention(q, k, v)
    both: Sequence[Any]
    if isinstance(module, nnx.Module):
        both = module.key, module.value  # type: ignore[attr-defined]
        cached = [x[...] for x in both]
    else:
        exists = module.has_variable(COLLECTION, "key")
        both = [
            module.variable(COLLECTION, name, lambda x=x: x.swapaxes(1, 2))
            for name, x in (("key", k), ("value", v))
        ]
        if not exists:
            return attention(q, k, v)
        cached = [x.value for x in both]
    cached = [_written(x, new, positions) for x, new in zip(cached, (k, v), strict=True)]
    for variable, x in zip(both, cached, strict=True):
        if isinstance(variable, nnx.Variable):
            variable[...] = x
        else:
            variable.value = x
    if q.shape[1] > 1:
        return attention(q, k, v)
    keys, values = (x.astype(q.dtype).swapaxes(1, 2) for x in cached)
    return with_positions(q, keys, values, positions=positions)


def _written(cached: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns cached [B, G, S, d] with those of the tokens [B, T, G, d] at their positions."""
    new = new.astype(cached.dtype).swapaxes(1, 2)
    if new.shape[2] > 1:
        return lax.dynamic_update_slice_in_dim(cached, new, 0, 2)
    write = jax.vmap(lambda row, x, at: lax.dynamic_update_slice_in_dim(row, x, at, 1))
    result: jax.Array = write(cached, new, positions[:, 0])
    return result


def visible(module: nn.Module, positions: jax.Array) -> jax.Array:
    """Returns the keys that tokens at `positions` [B, T] attend to, bool [B, 1, T, S].

    S is that of the cache of the module for T = 1, and T otherwise.
    """
    cached, keys = jax.tree.leaves(module.variables.get(COLLECTION, {})), positions.shape[1]
    if cached and keys == 1:
        keys = cached[0].shape[-2]
    return (jnp.arange(keys) <= positions[..., None])[:, None]


def remembered(module: nn.Module, positions: jax.Array | None, compute: Callable[[], T]) -> T:
    """Returns `compute()`; with `positions`, the first call stores it in "memory"."""
    if positions is None:
        return compute()
    result: T = module.variable(MEMORY, "source", compute).value
    return result


def check_memory(module: nn.Module, memory: jax.Array | None) -> None:
    """Rejects a first call of `decode` without the memory [B, S, D].

    Raises:
      ValueError: There is neither a memory nor the collection "memory".
    """
    if memory is None and MEMORY not in module.variables:
        raise ValueError(
            "decode: pass memory=model.encode(sources, mask) to the first call, and the "
            'collections "cache" and "memory" that it returns to later calls'
        )


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
                f"{name} beside positions: a decoder with a cache takes unpadded rows and returns "
                "logits"
            )
