"""Optimizers whose devices send 1 bit an element: the rules of 1-bit Adam and 0/1 Adam, and the
states of these and of 1-bit Lamb, whose rule is in :mod:`zerojax.experimental.one_bit_lamb`.

The rules expect the gradient from :mod:`zerojax.experimental.one_bit_momentum`, with
which the new momentum equals the one that was sent. In any other program they run on ordinary
gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from zerojax.xla.types import PyTree


class OneBitAdamState(NamedTuple):
    """State of 1-bit Adam.

    Attributes:
      count: int32 [], the number of completed updates.
      mu, nu: The first and second moments.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree


class OneBitLambState(NamedTuple):
    """State of 1-bit Lamb.

    Attributes:
      count, mu, nu: See :class:`OneBitAdamState`.
      fresh: The second moment that is updated after the warm-up too.
      ratio: float32 [] each, the running average of the warm-up's trust ratio.
      factor: float32 [] each, the last factor on ``ratio``.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree
    fresh: PyTree
    ratio: PyTree
    factor: PyTree


class ZeroOneAdamState(NamedTuple):
    """State of 0/1 Adam.

    Attributes:
      count, mu, nu: See :class:`OneBitAdamState`.
      squares: int32 [], the number of updates of ``nu``.
      interval: int32 [], the number of optimizer updates from one update of ``nu`` to the next.
      since: int32 [], the number of updates of ``nu`` since the interval grew.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree
    squares: jax.Array
    interval: jax.Array
    since: jax.Array


OneBitState: TypeAlias = OneBitAdamState | OneBitLambState | ZeroOneAdamState


class Sending(NamedTuple):
    """The way in which the gradients of the next update are sent.

    Attributes:
      plain: bool [], whether they are sent unquantized.
      beta: float32 [], the weight of the old momentum in the value that is sent in 1 bit; 0 sends
        the gradient itself.
      anew: bool [], whether errors start from zero.
    """

    plain: jax.Array
    beta: jax.Array
    anew: jax.Array


def sending(state: OneBitState, given: Mapping[str, Any]) -> Sending:
    """Returns how the next gradients are sent, from the optimizer's parameters in the JSON."""
    beta, never = jnp.float32(given["betas"][0]), jnp.zeros((), bool)
    if not isinstance(state, ZeroOneAdamState):
        return Sending(state.count < given["freeze_step"], beta, never)
    frozen = state.count > given["var_freeze_step"]
    plain = ~frozen & ((state.count + 1) % state.interval == 0)
    first = state.count == given["var_freeze_step"] + 1
    return Sending(plain, jnp.where(frozen, beta, 0.0), first)


def one_bit_state(opt_state: optax.OptState) -> OneBitState | None:
    """Finds the state of a 1-bit optimizer within an optimizer's state; None if there is none."""
    kinds = OneBitAdamState, OneBitLambState, ZeroOneAdamState

    def is_one_bit_state(x: object) -> bool:
        return isinstance(x, kinds)

    return next(
        filter(is_one_bit_state, jax.tree.leaves(opt_state, is_leaf=is_one_bit_state)), None
    )


def scale_by_one_bit_adam(
    b1: float, b2: float, eps: float, freeze_step: int, *, bias_correction: bool
) -> optax.GradientTransformation:
    r"""Scales by Adam's direction, with the variance frozen after ``freeze_step`` updates.

    .. math::

        m \leftarrow \beta_1 m + (1 - \beta_1) g, \quad
        u = \hat m / (\sqrt{\hat v} + \epsilon)

    The first ``freeze_step`` updates are Adam's; without ``bias_correction`` :math:`\hat m = m` and
    :math:`\hat v = v`, as in DeepSpeed's ``OnebitAdam``. Source: 1-bit Adam, arXiv:2102.02888.
    """

    def init(params: optax.Params) -> OneBitAdamState:
        return OneBitAdamState(jnp.zeros((), jnp.int32), *_zeros(params, 2))

    def update(
        grads: optax.Updates, state: OneBitAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, OneBitAdamState]:
        del params
        count = optax.safe_increment(state.count)
        mu = _average(grads, state.mu, b1)
        nu = _squares(grads, state.nu, b2, count <= freeze_step)
        seen = jnp.minimum(count, freeze_step)
        mu_correction, nu_correction = (
            _corrections(b1, count, b2, seen) if bias_correction else (1.0, 1.0)
        )
        updates = jax.tree.map(
            lambda m, v: (m / mu_correction) / (jnp.sqrt(v / nu_correction) + eps), mu, nu
        )
        return updates, OneBitAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_zero_one_adam(
    b1: float,
    b2: float,
    eps: float,
    var_freeze_step: int,
    var_update_scaler: int,
    *,
    bias_correction: bool,
) -> optax.GradientTransformation:
    """Scales by Adam's direction, with a variance that is updated at growing intervals.

    The interval doubles after each ``var_update_scaler`` updates of the variance. The variance is
    frozen after update number ``var_freeze_step + 1`` of the optimizer.

    Source: 0/1 Adam, arXiv:2202.06009, and DeepSpeed's ``ZeroOneAdam``, without local steps.
    """

    def init(params: optax.Params) -> ZeroOneAdamState:
        zero, one = (jnp.full((), x, jnp.int32) for x in (0, 1))
        mu, nu = _zeros(params, 2)
        return ZeroOneAdamState(zero, mu, nu, squares=zero + 0, interval=one, since=zero + 0)

    def update(
        grads: optax.Updates, state: ZeroOneAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        del params
        count = optax.safe_increment(state.count)
        due = (state.count <= var_freeze_step) & (count % state.interval == 0)
        mu, nu = _average(grads, state.mu, b1), _squares(grads, state.nu, b2, due)
        squares, since = state.squares + due, state.since + due
        grows = since == var_update_scaler
        interval = state.interval * jnp.where(grows, 2, 1)
        mu_correction, nu_correction = (
            _corrections(b1, count, b2, squares) if bias_correction else (1.0, 1.0)
        )
        updates = jax.tree.map(
            lambda m, v: (m / mu_correction) / (jnp.sqrt(v / nu_correction) + eps), mu, nu
        )
        since = jnp.where(grows, 0, since)
        return updates, ZeroOneAdamState(count, mu, nu, squares, interval, since)

    return optax.GradientTransformation(init, update)


def _zeros(params: PyTree, n: int) -> list[PyTree]:
    # Separate arrays: a state that is donated may contain a buffer only once.
    return [jax.tree.map(jnp.zeros_like, params) for _ in range(n)]


def _average(grads: PyTree, mu: PyTree, b1: float) -> PyTree:
    return jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, mu)


def _squares(grads: PyTree, nu: PyTree, b2: float, goes_on: jax.Array) -> PyTree:
    return jax.tree.map(lambda g, v: jnp.where(goes_on, b2 * v + (1 - b2) * g * g, v), grads, nu)


def _corrections(
    b1: float, count: jax.Array, b2: float, seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return 1 - b1 ** count.astype(jnp.float32), 1 - b2 ** seen.astype(jnp.float32)
