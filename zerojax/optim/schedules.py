"""DeepSpeed's learning-rate schedules, as functions of the number of updates made.

DeepSpeed ticks its schedule after each update, so the update that finds `count` updates behind it
runs at t = count - 1, and the first one at the schedule's start value.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.config import SchedulerConfig

Params = Mapping[str, Any]


def schedule(scheduler: SchedulerConfig | Mapping[str, Any], base_lr: float) -> optax.Schedule:
    """The rate of each update, exactly DeepSpeed's.

    With t = count - 1, w = max(2, warmup_num_steps) and T = total_num_steps:

    - WarmupLR: min + (max - min) g; g = ln(t + 1) / ln(w) ("log") or t / w ("linear") while
      t < w, then 1. `warmup_max_lr` is `base_lr` where it is not given.
    - WarmupDecayLR: the same, then g = max(0, (T - t) / max(1, T - w)).
    - WarmupCosineLR: base_lr times r0 + (1 - r0) g while t < w, then
      c + (1 - c) (1 + cos(pi min(1, (t - w + 1) / max(1, T - w)))) / 2.
    - OneCycle: from min to max over `cycle_first_step_size` updates, back over
      `cycle_second_step_size`, then min / (1 + rate (t - both + 1) / decay_step_size).
    - LRRangeTest: min (1 + rate i), i = (t + 1) / step_size, rounded down with staircase.

    The start value, at count 0, is the minimum, and 0 for WarmupCosineLR. Momentum is not part of
    it: OneCycle with `cycle_momentum` true is refused.

    Args:
      scheduler: a `SchedulerConfig`, or the JSON's object with `type` and `params`.
      base_lr: the optimizer's rate.

    Returns:
      A function from the count of updates made (an int or an integer array; updates that were
      skipped do not count) to the rate, in the default float dtype. It may be jitted.

    Raises:
      ConfigError: an unknown type or parameter, or a wrong value.

    Example:
      >>> rate = schedule({"type": "WarmupLR", "params": {
      ...     "warmup_num_steps": 10, "warmup_type": "linear"}}, base_lr=1e-3)
      >>> [round(float(rate(count)), 6) for count in (0, 1, 2, 11, 50)]
      [0.0, 0.0, 0.0001, 0.001, 0.001]
    """
    config = SchedulerConfig.of(scheduler)
    params = config.with_defaults()
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps")
    if total is not None and total < warmup:
        warnings.warn(
            f"scheduler.params.total_num_steps {total} is less than warmup_num_steps {warmup}: "
            "the run ends inside its warm-up",
            stacklevel=2,
        )
    rate_at = _RATES[config.type](params, float(base_lr))

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count) - 1
        return jnp.asarray(rate_at(t), dtype=float)

    return rate


# A rate as a function of t = count - 1, an integer array.
_Rate = Callable[[jax.Array], jax.Array]


def _float(value: jax.Array) -> jax.Array:
    return jnp.asarray(value, dtype=float)


def _warmup(params: Params) -> tuple[int, _Rate]:
    """The steps of the warm-up and its g, which holds while 0 <= t < w."""
    w = max(2, params["warmup_num_steps"])
    if params["warmup_type"] == "log":
        # t = -1 gets the start value, so that ln need not see 0.
        return w, lambda t: jnp.log(_float(jnp.maximum(t, 0) + 1)) * (1 / math.log(w))
    return w, lambda t: _float(t) / w


def _warmup_then(params: Params, base_lr: float, after: _Rate) -> _Rate:
    w, g = _warmup(params)
    low = params["warmup_min_lr"]
    high = base_lr if params["warmup_max_lr"] is None else params["warmup_max_lr"]

    def rate(t: jax.Array) -> jax.Array:
        share = jnp.where(t < w, g(t), after(t))
        return jnp.where(t < 0, low, low + (high - low) * share)

    return rate


def _warmup_lr(params: Params, base_lr: float) -> _Rate:
    return _warmup_then(params, base_lr, lambda t: jnp.ones_like(_float(t)))


def _warmup_decay_lr(params: Params, base_lr: float) -> _Rate:
    total, w = params["total_num_steps"], max(2, params["warmup_num_steps"])
    return _warmup_then(
        params, base_lr, lambda t: jnp.maximum(0.0, _float(total - t) / max(1, total - w))
    )


def _warmup_cosine_lr(params: Params, base_lr: float) -> _Rate:
    w, g = _warmup(params)
    span = max(1, params["total_num_steps"] - w)
    start, end = params["warmup_min_ratio"], params["cos_min_ratio"]

    def rate(t: jax.Array) -> jax.Array:
        progress = jnp.minimum(1.0, _float(t - w + 1) / span)
        cosine = end + (1 - end) * (1 + jnp.cos(math.pi * progress)) / 2
        ratio = jnp.where(t < w, start + (1 - start) * g(t), jnp.maximum(0.0, cosine))
        return jnp.where(t < 0, 0.0, base_lr * ratio)

    return rate


def _one_cycle(params: Params, base_lr: float) -> _Rate:
    up = params["cycle_first_step_size"]
    down = params["cycle_second_step_size"] or up
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    every = params["decay_step_size"]
    # DeepSpeed does not decay at all where the interval is 0.
    decay = params["decay_lr_rate"] / every if every else 0.0

    def rate(t: jax.Array) -> jax.Array:
        done = t + 1
        share = jnp.where(done <= up, _float(done) / up, _float(up + down - done) / down)
        decayed = low / (1 + decay * _float(jnp.maximum(0, done - up - down)))
        return jnp.where(t < up + down, low + (high - low) * share, decayed)

    return rate


def _lr_range_test(params: Params, base_lr: float) -> _Rate:
    low, growth = params["lr_range_test_min_lr"], params["lr_range_test_step_rate"]
    size, stairs = params["lr_range_test_step_size"], params["lr_range_test_staircase"]

    def rate(t: jax.Array) -> jax.Array:
        interval = _float((t + 1) // size) if stairs else _float(t + 1) / size
        return low * (1 + growth * interval)

    return rate


_RATES: dict[str, Callable[[Params, float], _Rate]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_decay_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}
