"""Learning-rate schedules of DeepSpeed and of transformers, by their names.

Both count updates. DeepSpeed ticks its schedule after each update, so that the update after
``count`` others runs at t = count - 1, and the first one at the schedule's start value
(`runtime/lr_schedules.py`); transformers' rate is a function of ``count`` (`optimization.py`).

A warm-up is t / w and not ``optax.linear_schedule(0, 1, w)``, which is 1 - (1 - t / w): its first
rates would have a few digits only.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from zerojax.config import ConfigError, SchedulerConfig
from zerojax.config.errors import suggestion
from zerojax.distributed import log

Params: TypeAlias = Mapping[str, Any]

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
    rate = _RATES[config.type](params, float(base_lr))
    return lambda count: _float(rate(jnp.asarray(count)))


def momentum_schedule(scheduler: SchedulerConfig | Mapping[str, object]) -> optax.Schedule | None:
    """Returns the schedule of the first beta, if there is one: OneCycle with `cycle_momentum`.

    The beta is max - (max - min) h over the cycle, with h the height of the rate in its cycle, then
    max (1 + decay_mom_rate (t - both + 1) / decay_step_size), which grows without bound. At count 0
    it is the minimum, so that the second update has nearly the maximum. All of this is as in
    DeepSpeed, which also sets the second beta to 0.99.

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
    low, high = params["cycle_min_mom"], params["cycle_max_mom"]
    height, intervals = _cycle(params)

    def momentum(count: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(count)
        decay = 1 + params["decay_mom_rate"] * intervals(n)
        return jnp.where(n < 1, low, (high - (high - low) * height(n)) * decay)

    return momentum


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


def _warmup(params: Params) -> tuple[int, optax.Schedule]:
    """Returns the steps w of the warm-up, and its g as a function of t."""
    w = max(2, params["warmup_num_steps"])
    if params["warmup_type"] == "log":
        # Evaluated at every t, and used where 0 <= t < w.
        return w, lambda t: jnp.log(_float(jnp.maximum(t, 0) + 1)) * (1 / math.log(w))
    return w, lambda t: _float(t) / w


def _warmup_lr(params: Params, base_lr: float) -> optax.Schedule:
    w, warmup = _warmup(params)
    low, high = params["warmup_min_lr"], params["warmup_max_lr"]
    span: int = params.get("total_num_steps", 0) - w

    def decay(t: jax.Array) -> jax.Array:
        return _float(jnp.maximum(0, span - t)) / max(1, span)

    after = decay if "total_num_steps" in params else optax.constant_schedule(1.0)
    g = optax.join_schedules([warmup, after], [w])
    # g is 0 at t = 0 as at the start.
    return lambda n: low + ((base_lr if high is None else high) - low) * g(jnp.maximum(n - 1, 0))


def _warmup_cosine_lr(params: Params, base_lr: float) -> optax.Schedule:
    w, g = _warmup(params)
    span = max(1, params["total_num_steps"] - w)
    start, end = params["warmup_min_ratio"], params["cos_min_ratio"]

    def cosine(after_warmup: jax.Array) -> jax.Array:
        # (1 + cos(pi x)) / 2 = sin(pi (1 - x) / 2)^2, which does not cancel as x nears 1.
        remaining = jnp.clip(span - after_warmup - 1, 0, span)
        x = _float(remaining) / span
        return jnp.asarray(end + (1 - end) * jnp.sin(math.pi / 2 * x) ** 2)

    ratio = optax.join_schedules([lambda t: start + (1 - start) * g(t), cosine], [w])
    return lambda n: jnp.where(n < 1, 0.0, base_lr * ratio(n - 1))


def _lr_range_test(params: Params, base_lr: float) -> optax.Schedule:
    low, growth = params["lr_range_test_min_lr"], params["lr_range_test_step_rate"]
    size, stairs = params["lr_range_test_step_size"], params["lr_range_test_staircase"]
    return lambda n: low * (1 + growth * (_float(n // size) if stairs else _float(n) / size))


def _one_cycle(params: Params, base_lr: float) -> optax.Schedule:
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    height, intervals = _cycle(params)
    return lambda n: (low + (high - low) * height(n)) / (1 + params["decay_lr_rate"] * intervals(n))


def _cycle(params: Params) -> tuple[optax.Schedule, optax.Schedule]:
    """Returns the shape of OneCycle as functions of n = t + 1, which rate and momentum share.

    With the halves F and S and the decay interval D, in updates, they are the height of the cycle,
    n / F up to n = F, then (F + S - n) / S down to 0, and the decay intervals (n - F - S) / D after
    the cycle, 0 before. DeepSpeed does not decay at all where the interval is 0.
    """
    up = params["cycle_first_step_size"]
    down = params["cycle_second_step_size"] or up
    every = params["decay_step_size"] or float("inf")

    def height(n: jax.Array) -> jax.Array:
        return jnp.where(n <= up, _float(n) / up, _float(jnp.maximum(0, up + down - n)) / down)

    return height, lambda n: _float(jnp.maximum(0, n - up - down)) / every


_RATES: dict[str, Callable[[Params, float], optax.Schedule]] = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_lr,
    "WarmupCosineLR": _warmup_cosine_lr,
    "OneCycle": _one_cycle,
    "LRRangeTest": _lr_range_test,
}
"""DeepSpeed's schedules: rates as functions of the number of completed updates."""


class Run(NamedTuple):
    """Base rate, warm-up steps, and total steps."""

    rate: float
    warmup: int
    steps: int

    @property
    def decay(self) -> int:
        """Steps after the warm-up, at least 1."""
        return max(1, self.steps - self.warmup)


def schedule_of_transformers(name: str, run: Run, options: Params | None = None) -> optax.Schedule:
    """Returns the schedule of the learning rate, equal to transformers'.

    With base rate r, w warm-up steps, T steps and t updates so far, the rate is r t / max(1, w)
    while t < w. Then, with x = (t - w) / max(1, T - w):

    - linear: r max(0, 1 - x).
    - cosine: r (1 + cos(2 pi c x)) / 2, ``num_cycles`` c = 0.5.
    - cosine_with_restarts: r (1 + cos(pi (c x mod 1))) / 2 and 0 from x = 1 on, ``num_cycles``
      c = 1.
    - cosine_with_min_lr: r (m + (1 - m) (1 + cos(2 pi c x)) / 2), m = ``min_lr_rate`` or
      ``min_lr`` / r.
    - polynomial: e + (r - e) (1 - x)^p, ``lr_end`` e = 1e-7, ``power`` p = 1.
    - inverse_sqrt: r / sqrt((t - w + s) / s), ``timescale`` s = w or 10,000.
    - constant_with_warmup: r; constant: r from the first update on.
    - cosine_warmup_with_min_lr: as cosine_with_min_lr, with x one update ahead; the warm-up is
      r (t + 1) / w, or from ``warmup_lr_rate`` r to r over its w updates.
    - warmup_stable_decay: r for ``num_stable_steps`` (by default what the others leave of T), then
      r (m + (1 - m) f(y)) with y from 0 to 1 over ``num_decay_steps`` and m = ``min_lr_ratio``; f
      is ``decay_type``: linear 1 - y, cosine (1 + cos(2 pi c y)) / 2, 1-sqrt 1 - sqrt(y). Then r m.
      The warm-up is r (m + (1 - m) f(1 - t / w)), f by ``warmup_type``.

    Args:
      name: A key of :data:`OF_TRANSFORMERS`.
      run: The base rate and the numbers of steps.
      options: The schedule's options, ``lr_scheduler_kwargs``.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = schedule_of_transformers("linear", Run(1.0, 2, 6))
      >>> [float(rate(t)) for t in range(7)]
      [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    build = OF_TRANSFORMERS[name]
    check_options(name, options or {}, [*inspect.signature(build).parameters][1:])
    fraction = build(run, **options or {})

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        return run.rate * _float(fraction(jnp.asarray(count)))

    jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))  # an invalid option is an error here
    return rate


def check_options(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Checks that a schedule has the options of ``lr_scheduler_kwargs``.

    Raises:
      ConfigError: It does not have one of them.
    """
    for option in {*options} - {*known}:
        remedy = suggestion(option, known)
        raise ConfigError(f"lr_scheduler_kwargs: {name} has no {option}; {remedy}")


def check_choice(option: str, value: object, values: Iterable[str]) -> None:
    """Checks that an option has one of its values.

    Raises:
      ConfigError: It has another value.
    """
    if value not in [*values]:
        known = ", ".join(values)
        raise ConfigError(f"lr_scheduler_kwargs: {option} = {value!r} is none of {known}")


def _wave(x: jax.Array, cycles: float = 0.5) -> jax.Array:
    return jnp.cos(math.pi * cycles * x) ** 2  # (1 + cos(2 pi cycles x)) / 2


def _ramped(run: Run, after: optax.Schedule) -> optax.Schedule:
    """Returns the fraction t / w in the warm-up, and then that of t - w."""
    return optax.join_schedules([lambda t: _float(t) / max(1, run.warmup), after], [run.warmup])


def _restarts(run: Run, num_cycles: float = 1) -> optax.Schedule:
    # In integer arithmetic: at a restart, a rounding error would give 0 in place of 1.
    n = run.decay
    return _ramped(run, lambda t: jnp.where(t < n, _wave(t * num_cycles % n / n), 0.0))


def _above(
    run: Run,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> optax.Schedule:
    if (min_lr_rate is None) == (min_lr is None):
        raise ConfigError("lr_scheduler_kwargs: this schedule takes min_lr or min_lr_rate")
    floor = min_lr_rate or 0.0 if min_lr is None else min_lr / run.rate
    return _ramped(run, lambda t: floor + (1 - floor) * _wave(t / run.decay, num_cycles))


def _above_ahead(
    run: Run,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> optax.Schedule:
    cosine = _above(run, num_cycles, min_lr, min_lr_rate)
    first = 1 / max(1, run.warmup) if warmup_lr_rate is None else warmup_lr_rate

    def ahead(t: jax.Array) -> jax.Array:
        ramp = first + (1 - first) * _float(t) / max(1, run.warmup - 1)
        return jnp.where(t < run.warmup, ramp, cosine(t + 1))

    return ahead


def _polynomial(run: Run, lr_end: float = 1e-7, power: float = 1.0) -> optax.Schedule:
    if lr_end and lr_end >= run.rate:
        raise ConfigError(f"lr_scheduler_kwargs: lr_end = {lr_end:g} must be below {run.rate:g}")
    return _ramped(run, optax.polynomial_schedule(1.0, lr_end / run.rate, power, run.decay))


def _inverse_sqrt(run: Run, timescale: float | None = None) -> optax.Schedule:
    scale = timescale or run.warmup or 10_000
    return _ramped(run, lambda t: 1 / jnp.sqrt((jnp.maximum(t, 0) + scale) / scale))


_FALLS: dict[str, Callable[..., jax.Array]] = {
    "linear": lambda y, cycles=0.5: 1 - y,
    "cosine": _wave,
    "1-sqrt": lambda y, cycles=0.5: 1 - jnp.sqrt(y),
}
"""Functions that fall from 1 to 0 as y goes from 0 to 1."""


def _stable_decay(
    run: Run,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> optax.Schedule:
    if num_decay_steps is None:
        raise ConfigError("lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps")
    check_choice("warmup_type", warmup_type, _FALLS)
    check_choice("decay_type", decay_type, _FALLS)
    stable = num_stable_steps
    stable = run.steps - num_decay_steps - run.warmup if stable is None else stable

    def fall(kind: str, t: jax.Array, steps: int, *cycles: float) -> jax.Array:
        y = jnp.clip(_float(t) / max(1, steps), 0.0, 1.0)
        return min_lr_ratio + (1 - min_lr_ratio) * _FALLS[kind](y, *cycles)

    return optax.join_schedules(
        [
            lambda t: fall(warmup_type, run.warmup - t, run.warmup),
            lambda t: fall(decay_type, t - stable, num_decay_steps, num_cycles),
            optax.constant_schedule(min_lr_ratio),
        ],
        [run.warmup, run.warmup + stable + num_decay_steps],
    )


OF_TRANSFORMERS: dict[str, Callable[..., optax.Schedule]] = {
    "linear": lambda run: _ramped(run, optax.linear_schedule(1.0, 0.0, run.decay)),
    "cosine": lambda run, num_cycles=0.5: _ramped(run, lambda t: _wave(t / run.decay, num_cycles)),
    "cosine_with_restarts": _restarts,
    "cosine_with_min_lr": _above,
    "cosine_warmup_with_min_lr": _above_ahead,
    "polynomial": _polynomial,
    "constant": lambda run: optax.constant_schedule(1.0),
    "constant_with_warmup": lambda run: _ramped(run, optax.constant_schedule(1.0)),
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable_decay,
}
"""transformers' schedules: functions of a run, and of the schedule's options with their defaults,
that return the fraction of the base rate."""
