"""Calls of cuDNN's that stand for attention in a forecast."""

import jax
import jax.numpy as jnp

from zerojax.models.assumed_attention import assumed_attention


def test_one_call_forward_and_one_backward_with_the_scores_shape() -> None:
    attention = assumed_attention(lambda function: function)
    q, k = jnp.zeros((2, 16, 4, 8), jnp.bfloat16), jnp.zeros((2, 16, 2, 8), jnp.bfloat16)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention(q, k, v).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(traced.out_info)] == [
        (x.shape, x.dtype) for x in (q, k, k)
    ]
    text = str(traced.jaxpr)
    assert text.count("__cudnn$fmhaSoftmaxBackward") == 1
    assert text.count("__cudnn$fmhaSoftmax") == 2
    assert text.count('"dimensions":["2","4","16","16"]') == 2
