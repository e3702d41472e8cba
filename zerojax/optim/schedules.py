"""DeepSpeed's learning-rate schedules, as functions of the number of completed updates.

DeepSpeed ticks its schedule after each update. So the update after `count` others runs at
t = count - 1, and the first update at the schedule's start value (`runtime/lr_schedules.py`).
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from zerojax.config import ConfigError, SchedulerConfig
from zerojax.distributed import log

Params: TypeAlias = Mapping[str, Any]
OfStep: TypeAlias = Callable[[jax.Array], jax.Array]
"""A number as a function of t = count - 1, an integer array."""

SECOND_BETA = 0.99
"""DeepSpeed's second beta during and after OneCycle's cycle, if the first beta cycles."""

_MOST_STEPS = 2**30  # sums of two fit in the int32 counters


def schedule(scheduler: SchedulerConfig | Mapping[str, object], base_lr: float) -> optax.Schedule:
    """Returns the schedule of the learning rate, equal to DeepSpeed's.

    With t = count - 1, w = max(2, warmup_num_steps) and T = total_num_steps:

    - WarmupLR: min + (max - min) g; g = ln(t + 1) / ln(w) ("log") or t / w ("linear") while
      t < w, then 1. `warmup_max_lr` null, the default, is `base_lr`.
    - WarmupDecayLR: as WarmupLR while t < w, then g = max(0, (T - t) / max(1, T - w));
      `warmup_max_lr` is 1e-3 by default.
    - WarmupCosineLR: base_lr times r0 + (1 - r0) g while t < w, then
      c + (1 - c) (1 + cos(pi min(1, (t - w + 1) / max(1, T - w)))) / 2.
    - OneCycle: from min to max over `cycle_first_step_size` updates, back over
      `cycle_second_step_size`, then min / (1 + rate (t - both + 1) / decay_step_size).
      :func:`zerojax.optim.schedules.momentum_schedule` returns its momentum. The stair counts have
      no effect, as in DeepSpeed.
    - LRRangeTest: min (1 + rate i), i = (t + 1) / step_size, rounded down with staircase.

    The start value, at count 0, is the minimum, and 0 for WarmupCosineLR.

    Args:
      scheduler: A `SchedulerConfig`, or the JSON's object with `type` and `params`.
      base_lr: The optimizer's learning rate.

    Returns:
      An optax schedule: a function from the number of completed updates (an int or an integer
      array; skipped updates do not count) to the rate, in the default float dtype, within 1e-6
      relative of the formula in float32. The function may be jitted and vmapped.

    Raises:
      ConfigError: An unknown type or parameter, or a wrong value.

    Example:
      >>> rate = schedule({"type": "WarmupLR", "params": {
      ...     "warmup_num_steps": 10, "warmup_type": "linear"}}, base_lr=1e-3)
      >>> [round(float(rate(count)), 6) for count in (0, 1, 2, 11, 50)]
      [0.0, 0.0, 0.0001, 0.001, 0.001]
    """
    config = SchedulerConfig.of(scheduler)
    params = config.with_defaults()
    _check(params)
    return _as_schedule(_RATES[config.type](params, float(base_lr)))


def momentum_schedule(scheduler: SchedulerConfig | Mapping[str, object]) -> optax.Schedule | None:
    """Returns the schedule of the first beta, if there is one: OneCycle with `cycle_momentum`.

    The beta is max - (max - min) h over the cycle, with h the height of the rate in its cycle, then
    max (1 + decay_mom_rate (t - both + 1) / decay_step_size); at count 0 it is the minimum.
    DeepSpeed also sets the second beta to 0.99.

    Args:
      scheduler: A `SchedulerConfig`, or the JSON's object with `type` and `params`.

    Returns:
      A function of the number of completed updates, or None if the schedule sets no momentum.

    Raises:
      ConfigError: An unknown type or parameter, or a wrong value.

    Example:
      >>> momentum = momentum_schedule({"type": "OneCycle", "params": {
      ...     "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}})
      >>> [round(float(momentum(count)), 6) for count in range(6)]
      [0.8, 0.85, 0.8, 0.85, 0.9, 0.9]
      >>> momentum_schedule({"type": "WarmupLR"}) is None
      True
    """
    config = SchedulerConfig.of(scheduler)
    params = config.with_defaults()
    if not params.get("cycle_momentum"):
        return None
    return _as_schedule(cycled_momentum(params))


def _as_schedule(of_step: OfStep) -> optax.Schedule:
    def value(count: jax.typing.ArrayLike) -> jax.Array:
        return jnp.asarray(of_step(jnp.asarray(count) - 1), dtype=float)

    return value


def _check(params: Params) -> None:
    problems = [
        f"scheduler.params.{name}: {value} steps are more than the counters hold; "
        f"{_MOST_STEPS} is the most"
        for name, value in params.items()
        if name.endswith(("num_steps", "step_size")) and (value or 0) > _MOST_STEPS
    ]
    if problems:
        raise ConfigError(problems)
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if total is not None and total < warmup and log.is_first():
        warnings.warn(
            f"scheduler.params.total_num_steps {total} is less than warmup_num_steps {warmup}: "
            "the run ends inside its warm-up",
            stacklevel=3,
        )
    stairs = [n for n in params if n.endswith("stair_count") and params[n]]
    if stairs and log.is_first():
        warnings.warn(
            f"scheduler.params: {' and '.join(stairs)} without effect, as in DeepSpeed: "
            "OneCycle moves in straight lines",
            stacklevel=3,
        )


def _float(value: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(value, dtype=float)


def _warmup(params: Params) -> tuple[int, OfStep]:
    """Returns the steps w of the warm-up, and its g for 0 <= t < w."""
    w = max(2, params["warmup_num_steps"])
    if params["warmup_type"] == "log":
        # At t = -1 the rate is the start value, so that ln(0) is never needed.
        return w, lambda t: jnp.log(_float(jnp.maximum(t, 0) + 1)) * (1 / math.log(w))
    return w, lambda t: _float(t) / w


def _warmup_then(params: Params, base_lr: float, after: OfStep) -> OfStep:
    w, g = _warmup(params)
    low = params["warmup_min_lr"]
    high = base_lr if params["warmup_max_lr"] is None else params["warmup_max_lr"]

    def rate(t: jax.Array) -> jax.Array:
        share = jnp.where(t < w, g(t), after(t))
        return jnp.where(t < 0, low, low + (high - low) * share)

    return rate


def _warmup_decay_lr(params: Params, base_lr: float) -> OfStep:
    total, w = params["total_num_steps"], max(2, params["warmup_num_steps"])
    return _warmup_then(
        params, base_lr, lambda t: _float(jnp.maximum(0, total - t)) / max(1, total - w)
    )


def _warmup_cosine_lr(params: Params, base_lr: float) -> OfStep:
    w, g = _warmup(params)
    span = max(1, params["total_num_steps"] - w)
    start, end = params["warmup_min_ratio"], params["cos_min_ratio"]

    def rate(t: jax.Array) -> jax.Array:
        # (1 + cos(pi x)) / 2 = sin(pi (1 - x) / 2)^2, which does not cancel as x nears 1.
        remaining = jnp.clip(span - (t - w + 1), 0, span)
        cosine = end + (1 - end) * jnp.sin(math.pi / 2 * (_float(remaining) / span)) ** 2
        ratio = jnp.where(t < w, start + (1 - start) * g(t), cosine)
        return jnp.where(t < 0, 0.0, base_lr * ratio)

    return rate


def _lr_range_test(params: Params, base_lr: float) -> OfStep:
    low, growth = params["lr_range_test_min_lr"], params["lr_range_test_step_rate"]
    size, stairs = params["lr_range_test_step_size"], params["lr_range_test_staircase"]

    def rate(t: jax.Array) -> jax.Array:
        interval = _float((t + 1) // size) if stairs else _float(t + 1) / size
        return cast(jax.Array, low * (1 + growth * interval))

    return rate


def cycled_rate(params: Params) -> OfStep:
    """Returns OneCycle's rate: min + (max - min) h, then min / (1 + decay_lr_rate d).

    At t = -1 the rate is min. h is the height of the cycle, d the number of decay intervals after
    the cycle.

    Example:
      >>> rate = cycled_rate({"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2,
      ...     "cycle_second_step_size": None, "decay_lr_rate": 1.0, "decay_step_size": 1})
      >>> [float(rate(t)) for t in range(-1, 5)]
      [1.0, 2.0, 3.0, 2.0, 1.0, 0.5]
    """
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    cycle = _cycle(params)

    def rate(t: jax.Array) -> jax.Array:
        decayed = low / (1 + params["decay_lr_rate"] * cycle.intervals(t))
        return jnp.where(cycle.runs(t), low + (high - low) * cycle.height(t), decayed)

    return rate


def cycled_momentum(params: Params) -> OfStep:
    """Returns OneCycle's momentum: max - (max - min) h, then max (1 + decay_mom_rate d).

    At t = -1 the momentum is min, as in DeepSpeed: the first update has the minimum, the second
    nearly the maximum. As in DeepSpeed, too, with a `decay_mom_rate` above 0 the momentum grows
    without bound, to 1 and beyond.

    Example:
      >>> momentum = cycled_momentum({"cycle_min_mom": 0.5, "cycle_max_mom": 1.0,
      ...     "cycle_first_step_size": 2, "cycle_second_step_size": None,
      ...     "decay_mom_rate": -0.5, "decay_step_size": 1})
      >>> [float(momentum(t)) for t in range(-1, 5)]
      [0.5, 0.75, 0.5, 0.75, 1.0, 0.5]
    """
    low, high = params["cycle_min_mom"], params["cycle_max_mom"]
    cycle = _cycle(params)

    def momentum(t: jax.Array) -> jax.Array:
        decayed = high * (1 + params["decay_mom_rate"] * cycle.intervals(t))
        cycled = jnp.where(cycle.runs(t), high - (high - low) * cycle.height(t), decayed)
        return jnp.where(t < 0, low, cycled)

    return momentum


class _Cycle(NamedTuple):
    """The shape of OneCycle, which rate and momentum share; DeepSpeed's `runtime/lr_schedules.py`.

    n is t + 1, F and S are the sizes of the two halves, and D is the decay interval, in updates.

    Attributes:
      runs: Whether t is within the cycle.
      height: n / F for n <= F, then (F + S - n) / S until n = F + S.
      intervals: (n - F - S) / D after the cycle, 0 before.
    """

    runs: OfStep
    height: OfStep
    intervals: OfStep


def _cycle(params: Params) -> _Cycle:
    up = params["cycle_first_step_size"]
    down = params["cycle_second_step_size"] or up
    # DeepSpeed does not decay at all where the interval is 0.
    every = params["decay_step_size"] or float("inf")

    def height(t: jax.Array) -> jax.Array:
        n = t + 1
        return jnp.where(n <= up, _float(n) / up, _float(up + down - n) / down)

    def intervals(t: jax.Array) -> jax.Array:
        return _float(jnp.maximum(0, t + 1 - up - down)) / every

    return _Cycle(lambda t: t < up + down, height, intervals)


_RATES: dict[str, Callable[[Params, float], OfStep]] = {
    "WarmupLR": lambda params, base_lr: _warmup_then(
        params, base_lr, lambda t: jnp.ones_like(_float(t))
    ),
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": lambda params, base_lr: cycled_rate(params),
    "LRRangeTest": _lr_range_test,
}
