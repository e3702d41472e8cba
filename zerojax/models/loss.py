"""Cross-entropy that stores no fp32 array of the logits' size.

Example::

    loss_fn(logits, targets)                     # mean over B x T tokens, nats

Shapes: logits [B, T, V], targets int [B, T].
"""

import jax
import jax.numpy as jnp

Residuals = tuple[jax.Array, jax.Array, jax.Array]  # logits, targets, and their log-sum-exp


def loss_fn(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the mean cross-entropy of logits [B, T, V] and targets [B, T], in nats, fp32 []."""
    return cross_entropy(logits, targets).mean()


def widen(x: jax.Array) -> jax.Array:
    """Converts fp16 and bf16 to fp32; wider dtypes are unchanged.

    XLA fuses the conversion into the readers of a matrix product's result, so that the array in
    memory keeps its dtype.
    """
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def logits_or_losses(logits: jax.Array, targets: jax.Array | None) -> jax.Array:
    """Returns a model's logits in fp32 or wider; with targets the loss per token, [B, T]."""
    return widen(logits) if targets is None else cross_entropy(widen(logits), targets)


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the loss per token, [B, T], in fp32 or wider.

    The gradient is a custom rule because autodiff would save exp(logits) in fp32 for the backward
    pass, the largest array of the step. This rule saves only the logits, and the gradient
    softmax(logits) - onehot(targets) is one elementwise pass in the logits' dtype. A comparison
    selects the target, which shards and fuses, while a gather's transpose (a scatter) does not.
    """
    return _cross_entropy_fwd(logits, targets)[0]


def _cross_entropy_fwd(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, Residuals]:
    wide = widen(logits)
    lse = jax.nn.logsumexp(wide, axis=-1)
    label = jnp.where(_onehot(targets, logits.shape[-1]), wide, 0).sum(-1)
    return lse - label, (logits, targets, lse)


def _cross_entropy_bwd(residuals: Residuals, grad: jax.Array) -> tuple[jax.Array, None]:
    logits, targets, lse = residuals
    softmax = jnp.exp(logits.astype(lse.dtype) - lse[..., None])
    d_logits = (softmax - _onehot(targets, logits.shape[-1])) * grad[..., None]
    return d_logits.astype(logits.dtype), None


cross_entropy.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def _onehot(targets: jax.Array, vocab_size: int) -> jax.Array:
    return targets[..., None] == jnp.arange(vocab_size)
