"""1-bit Lamb: Lamb with variance and trust ratios that are frozen after a warm-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.experimental.one_bit import OneBitLambState


def scale_by_one_bit_lamb(
    given: Mapping[str, Any], decay: optax.GradientTransformation
) -> optax.GradientTransformation:
    r"""Scales by Lamb's direction; freezes variance and trust ratios after ``freeze_step`` updates.

    The update is :math:`u = m / (\sqrt v + \epsilon) + d p`, times the trust ratio :math:`\rho =
    \operatorname{clamp}(\lVert p \rVert / \lVert u \rVert)`, whose running average is :math:`c`
    (``coeff_beta``). After the warm-up :math:`v` is frozen, and :math:`u` is multiplied by
    :math:`c f` instead. With the second moment :math:`v'` that is still updated, :math:`f` is
    :math:`\max (\sqrt v + \epsilon) / (\sqrt{v'} + \epsilon)`, weighted by the share of
    :math:`u` without decay, within ``factor_min`` and ``factor_max`` and within
    ``factor_threshold`` of the last :math:`f`. ``bias_correction`` multiplies by
    :math:`\sqrt{1 - \beta_2^k} / (1 - \beta_1^n)` at the :math:`n`-th update, with :math:`k`
    the smaller of :math:`n` and ``freeze_step``, as zerojax's Lamb does (:math:`k = n`) and
    DeepSpeed's ``OnebitLamb`` does not. Source: 1-bit LAMB, arXiv:2104.06069, and DeepSpeed's
    ``onebit/lamb.py``, which sends all momenta in one message with a scale for each; zerojax sends
    each momentum separately.

    Args:
      given: The parameters under their names in the JSON.
      decay: The transformation that adds decayed weights; :func:`optax.identity` for none.
    """
    (b1, b2), eps = given["betas"], given["eps"]
    freeze_step, keep = given["freeze_step"], given["coeff_beta"]
    step_up, step_down = 1 + given["factor_threshold"], 1 - given["factor_threshold"]

    def init(params: optax.Params) -> OneBitLambState:
        mu, nu, fresh = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        ratio, factor = (
            jax.tree.map(lambda _, x=x: jnp.full((), x, jnp.float32), params) for x in (0.0, 1.0)
        )
        return OneBitLambState(jnp.zeros((), jnp.int32), mu, nu, fresh, ratio, factor)

    def update(
        grads: optax.Updates, state: OneBitLambState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OneBitLambState]:
        if params is None:
            raise ValueError("Lamb needs the parameters: call update(updates, state, params)")
        count = optax.safe_increment(state.count)
        warm = count <= freeze_step
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        next_fresh = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.fresh)
        nu = jax.tree.map(lambda new, v: jnp.where(warm, new, v), next_fresh, state.nu)
        undecayed = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        direction, _ = decay.update(undecayed, decay.init(params), params)
        ratio = jax.tree.map(trust_ratio, params, direction)
        averaged = jax.tree.map(
            lambda c, r: jnp.where(warm & (r != 1), keep * c + (1 - keep) * r, c),
            state.ratio,
            ratio,
        )
        factor = jax.tree.map(
            lambda *each: jnp.where(warm, each[-1], next_factor(*each)),
            nu, next_fresh, undecayed, direction, state.factor,
        )  # fmt: skip
        correction = 1.0
        if given["bias_correction"]:
            seen = jnp.minimum(count, freeze_step).astype(jnp.float32)
            correction = jnp.sqrt(1 - b2**seen) / (1 - b1 ** count.astype(jnp.float32))
        updates = jax.tree.map(
            lambda u, r, c, f: u * (jnp.where(warm, r, c * f) * correction).astype(u.dtype),
            direction, ratio, averaged, factor,
        )  # fmt: skip
        return updates, OneBitLambState(count, mu, nu, next_fresh, averaged, factor)

    def trust_ratio(p: jax.Array, u: jax.Array) -> jax.Array:
        param_norm, update_norm = jnp.linalg.norm(p.ravel()), jnp.linalg.norm(u.ravel())
        known = (param_norm != 0) & (update_norm != 0)
        ratio = param_norm / jnp.where(known, update_norm, 1.0)
        clamped = jnp.clip(ratio, given["min_coeff"], given["max_coeff"])
        return jnp.where(known, clamped, 1.0).astype(jnp.float32)

    def next_factor(
        v: jax.Array, fresh: jax.Array, undecayed: jax.Array, direction: jax.Array, last: jax.Array
    ) -> jax.Array:
        factor = jnp.max((jnp.sqrt(v) + eps) / (jnp.sqrt(fresh) + eps))
        norm = jnp.linalg.norm(direction.ravel())
        share = jnp.linalg.norm(undecayed.ravel()) / jnp.where(norm == 0, 1.0, norm)
        share = jnp.where(norm == 0, 1.0, jnp.minimum(share, 1.0))
        factor = jnp.clip(factor * share + 1 - share, given["factor_min"], given["factor_max"])
        return jnp.clip(factor, last * step_down, last * step_up).astype(jnp.float32)

    return optax.GradientTransformation(init, update)
