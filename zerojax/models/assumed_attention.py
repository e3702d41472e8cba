"""Attention as a single cuDNN call, for programs compiled on machines without cuDNN.

    Llama(config, attention=assumed_attention(zero.per_device))

The calls have cuDNN's names and shapes, so that a forecast counts their arithmetic and the arrays
they read and write. It assumes that cuDNN accepts these shapes. A program with these calls
compiles but cannot run.
"""

import json
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax.models.blocks import Attention
from zerojax.xla.types import PyTree

Arrays = Sequence[jax.Array]

NAME = "attention"
"""Name of the forward pass's results, for ``jax.checkpoint_policies.save_only_these_names``."""


def assumed_attention(per_device: Callable[..., Callable[..., PyTree]]) -> Attention:
    """Returns attention of q [B, T, H, d] to k and v [B, T, G, d]; each device runs its own rows.

    The keyword ``mask`` of an attention changes nothing: no forecast counts the mask.

    Args:
      per_device: :meth:`zerojax.api.Zero.per_device`.
    """

    @jax.custom_vjp
    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Arrays]:
        out, sums = (checkpoint_name(x, NAME) for x in per_device(_forward)(q, k, v))
        return out, (q, k, v, out, sums)

    def backward(residuals: Arrays, gradient: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(per_device(_backward)(*residuals, gradient))

    attention.defvjp(forward, backward)
    return lambda q, k, v, mask=None: attention(q, k, v)


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Arrays:
    rows, tokens, heads, _ = q.shape
    sums = jax.ShapeDtypeStruct((rows, heads, tokens), jnp.float32)  # log-sum-exp of each query
    return _call("__cudnn$fmhaSoftmax", (_like(q), sums), q, k, v)


def _backward(
    q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, sums: jax.Array, gradient: jax.Array
) -> Arrays:
    outputs = tuple(map(_like, (q, k, v)))
    return _call("__cudnn$fmhaSoftmaxBackward", outputs, q, k, v, out, sums, gradient)


def _call(
    target: str,
    results: Sequence[jax.ShapeDtypeStruct],
    q: jax.Array,
    k: jax.Array,
    *rest: jax.Array,
) -> Arrays:
    rows, queries, heads, _ = q.shape
    scores = [str(size) for size in (rows, heads, queries, k.shape[1])]
    config = {"intermediate_tensor_shape": {"dimensions": scores}, "mask_type": "CAUSAL"}
    call: Callable[..., Arrays] = jax.ffi.ffi_call(
        target,
        results,
        custom_call_api_version=1,
        legacy_backend_config=json.dumps(
            {"cudnn_fmha_backend_config": config}, separators=(",", ":")
        ),
    )
    return call(q, k, *rest)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
