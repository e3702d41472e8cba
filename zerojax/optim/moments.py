"""Adam's moments stored in bfloat16, rounded stochastically.

Between two updates the second moment changes by about 1 - b2 of itself. For b2 = 0.999 that is less
than half the distance of two neighbours in bfloat16 (2^-9 to 2^-8 of the value), so that rounding
to nearest leaves the moment where it is. Stochastic rounding is right in the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax import ScaleByAdamState

from zerojax.xla.types import PyTree

_HIGH, _LOW = 0xFFFF0000, 0xFFFF  # the bits of a float32 that bfloat16 has, and those it lacks


def bf16_moments(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    r"""Stores the two moments of an optimizer of Adam's family in bfloat16.

    An update computes in float32, and rounds each new moment :math:`x` to one of its two neighbours
    :math:`a < x < b` in bfloat16, to :math:`b` with probability :math:`(x - a) / (b - a)`.

    The random bits are a hash of the stored moments of the element and of the count of updates:
    equal on any number of devices and at every stage, computed by each device for its shards, and
    by rows under offload. Elements whose stored moments are equal, as at the start, share them. All
    else in the state, and its tree, is as ``tx`` has it.

    Args:
      tx: A transformation with ``count``, ``mu`` and ``nu`` in one node of its state, as those of
        ``optax.adamw``, ``optax.lamb``, ``optax.nadam`` have them. Only float32 moments are stored
        in bfloat16.

    Raises:
      ValueError: From ``init``, if the state has no such node.

    Example:
      >>> tx = bf16_moments(optax.adam(1e-3))
      >>> params = {"w": jnp.ones(3)}
      >>> updates, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
      >>> state[0].nu["w"].dtype, updates["w"].dtype
      (dtype(bfloat16), dtype('float32'))
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        return to_bf16(inner.init(params))

    def update(
        grads: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        before = _each(lambda node: _cast(node, jnp.bfloat16, jnp.float32), state)
        updates, after = inner.update(grads, before, params, **extra)
        return updates, _each(_rounded, after, before)

    return optax.GradientTransformationExtraArgs(init, update)


def to_bf16(state: optax.OptState) -> optax.OptState:
    """Rounds the float32 moments in an optimizer's state to nearest.

    Raises:
      ValueError: The state has no node with ``count``, ``mu`` and ``nu``.
    """
    if not any(map(_has_moments, jax.tree.leaves(state, is_leaf=_has_moments))):
        raise ValueError(
            "bf16_optimizer_states: the optimizer's state has no two moments (count, mu and nu in "
            "one node). Use one of Adam's family, such as optax.adamw, or remove the key."
        )
    return _each(lambda node: _cast(node, jnp.float32, jnp.bfloat16), state)


def in_bf16(state: optax.OptState) -> bool:
    """Returns whether no moment of a state is float32."""
    after = jax.eval_shape(to_bf16, state)
    return [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(after)]


def _has_moments(node: object) -> bool:
    """Returns whether a node of a state has moments: a ``ScaleByAdamState`` or one like it."""
    return {"count", "mu", "nu"} <= {*getattr(node, "_fields", ())}


def _each(function: Callable[..., ScaleByAdamState], *states: PyTree) -> PyTree:
    """Maps ``function`` over the nodes with moments."""

    def changed(node: PyTree, *others: PyTree) -> PyTree:
        return function(node, *others) if _has_moments(node) else node

    return jax.tree.map(changed, *states, is_leaf=_has_moments)


def _cast(node: ScaleByAdamState, old: type, new: type) -> ScaleByAdamState:
    """Casts the moments of dtype ``old`` to ``new``."""

    def cast(x: jax.Array) -> jax.Array:
        return x.astype(new) if x.dtype == old else x

    return node._replace(mu=jax.tree.map(cast, node.mu), nu=jax.tree.map(cast, node.nu))


def _rounded(after: ScaleByAdamState, before: ScaleByAdamState) -> ScaleByAdamState:
    """Rounds new moments to bfloat16; the old ones and their count are the noise."""
    seed = _hash(before.count.astype(jnp.uint32))
    noise = jax.tree.map(
        # Half of the bits of each: those that bfloat16 has.
        lambda m, v: _hash((_bits(m) | _bits(v) >> 16) ^ seed),
        before.mu,
        before.nu,
    )
    return after._replace(
        mu=jax.tree.map(lambda x, bits: _round(x, bits >> 16), after.mu, noise),
        nu=jax.tree.map(lambda x, bits: _round(x, bits & _LOW), after.nu, noise),
    )


def _round(x: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds float32 to bfloat16, away from zero if the bits that are lost and the noise, below
    2^16, are together at least 2^16."""
    if x.dtype != jnp.float32:
        return x
    rounded = lax.bitcast_convert_type((_bits(x) + noise) & jnp.uint32(_HIGH), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(jnp.real(x).astype(jnp.float32), jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    """Returns the finalizer of MurmurHash3, uint32: each bit depends on all bits of ``x``."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16
