"""Learning-rate schedules of transformers, as functions of the number of updates so far.

With base rate r, w warm-up steps, T steps and t updates so far, the rate is r t / max(1, w) while
t < w. Then, with x = (t - w) / max(1, T - w), as in transformers' ``optimization.py``:

- linear: r max(0, 1 - x).
- cosine: r max(0, (1 + cos(2 pi c x)) / 2), ``num_cycles`` c = 0.5.
- cosine_with_restarts: r (1 + cos(pi (c x mod 1))) / 2 and 0 from x = 1 on, ``num_cycles`` c = 1.
- cosine_with_min_lr: r (m + (1 - m) (1 + cos(2 pi c x)) / 2), m = ``min_lr_rate`` or
  ``min_lr`` / r.
- polynomial: e + (r - e) (1 - x)^p, ``lr_end`` e = 1e-7, ``power`` p = 1.
- inverse_sqrt: r / sqrt((t - w + s) / s), ``timescale`` s = w or 10,000.
- constant_with_warmup: r; constant: r from the first update on.
- cosine_warmup_with_min_lr: as cosine_with_min_lr, with x one update ahead; the warm-up is
  r (t + 1) / w, or from ``warmup_lr_rate`` r to r over its w updates.
- warmup_stable_decay: r for ``num_stable_steps`` (by default what the others leave of T), then
  r (m + (1 - m) f(y)) with y from 0 to 1 over ``num_decay_steps`` and m = ``min_lr_ratio``; f is
  ``decay_type``: linear 1 - y, cosine (1 + cos(2 pi c y)) / 2, 1-sqrt 1 - sqrt(y). Then r m. The
  warm-up is r (m + (1 - m) (1 - f(t / w))), f by ``warmup_type``.

The rates that evaluations decide are in :mod:`zerojax.trainer.metric_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from zerojax.config.errors import ConfigError, suggestion

Options: TypeAlias = Mapping[str, Any]


class Run(NamedTuple):
    """Base rate, warm-up steps, and total steps."""

    rate: float
    warmup: int
    steps: int


Factor: TypeAlias = Callable[[Run, jax.Array, jax.Array, Options], jax.Array]
"""Function that returns a fraction of the base rate, from t and x."""


class Shape(NamedTuple):
    """The form of a schedule.

    Attributes:
      after: The fraction of the base rate after the warm-up.
      options: The options, with their defaults.
      warmup: The fraction of the base rate in the warm-up.
    """

    after: Factor
    options: dict[str, object]
    warmup: Factor = lambda run, t, x, options: jnp.asarray(t, float) / max(1, run.warmup)


def schedule(name: str, run: Run, options: Options | None = None) -> optax.Schedule:
    """Returns the named schedule.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = schedule("linear", Run(1.0, 2, 6))
      >>> [float(rate(t)) for t in range(7)]
      [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    shape = SCHEDULES[name]
    chosen = chosen_options(name, shape.options, options)
    if chosen.get("lr_end", 0) and chosen["lr_end"] >= run.rate:
        raise ConfigError(
            f"lr_scheduler_kwargs: lr_end = {chosen['lr_end']:g} must be below {run.rate:g}"
        )
    decay_steps = max(1, run.steps - run.warmup)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count)
        x = jnp.asarray(t - run.warmup, float) / decay_steps
        factor = shape.after(run, t, x, chosen)
        if name != "constant":
            factor = jnp.where(t < run.warmup, shape.warmup(run, t, x, chosen), factor)
        return run.rate * factor

    jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))  # an invalid option is an error here
    return rate


def chosen_options(
    name: str, defaults: Mapping[str, object], options: Options | None
) -> dict[str, Any]:
    """Returns ``lr_scheduler_kwargs`` with the defaults of a schedule.

    Raises:
      ConfigError: The schedule does not have an option.
    """
    for option in (options or {}).keys() - defaults.keys():
        remedy = suggestion(option, defaults)
        raise ConfigError(f"lr_scheduler_kwargs: {name} has no {option}; {remedy}")
    return {**defaults, **(options or {})}


def check_choice(options: Options, option: str, values: Iterable[str]) -> None:
    """Checks that an option has one of its values.

    Raises:
      ConfigError: It has another value.
    """
    if options[option] not in values:
        known = ", ".join(values)
        raise ConfigError(f"lr_scheduler_kwargs: {option} = {options[option]!r} is none of {known}")


def _cosine(x: jax.Array, cycles: float) -> jax.Array:
    return jnp.maximum(0.0, 0.5 * (1 + jnp.cos(2 * math.pi * cycles * x)))


def _restarts(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    # In integer arithmetic: at a restart, a rounding error would give 0 in place of 1.
    span, cycles = max(1, run.steps - run.warmup), options["num_cycles"]
    phase = (t - run.warmup) * cycles % span / span
    return jnp.where(x >= 1, 0.0, 0.5 * (1 + jnp.cos(math.pi * phase)))


def _floored(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    floor_factor, floor_rate = options["min_lr_rate"], options["min_lr"]
    if (floor_factor is None) == (floor_rate is None):
        raise ConfigError("lr_scheduler_kwargs: this schedule takes min_lr or min_lr_rate")
    floor = floor_rate / run.rate if floor_factor is None else floor_factor
    return cast(jax.Array, floor + (1 - floor) * _cosine(x, options["num_cycles"]))


def _floored_ahead(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    return _floored(run, t, x + 1 / max(1, run.steps - run.warmup), options)


def _raised(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    first = options["warmup_lr_rate"]
    if first is None:
        return (t + 1) / max(1, run.warmup)
    return cast(jax.Array, first + (1 - first) * t / max(1, run.warmup - 1))


_FALLS: dict[str, Callable[[jax.Array, float], jax.Array]] = {
    "linear": lambda y, cycles: 1 - y,
    "cosine": _cosine,
    "1-sqrt": lambda y, cycles: 1 - jnp.sqrt(y),
}
"""Functions that fall from 1 to 0 as y goes from 0 to 1."""


def _fall(options: Options, option: str, y: jax.Array, cycles: float) -> jax.Array:
    check_choice(options, option, _FALLS)
    return _FALLS[options[option]](jnp.clip(y, 0.0, 1.0), cycles)


def _above(floor: float, factor: jax.Array) -> jax.Array:
    return jnp.maximum(0.0, factor * (1 - floor) + floor)


def _stable_decay(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    decay, stable = options["num_decay_steps"], options["num_stable_steps"]
    if decay is None:
        raise ConfigError("lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps")
    begin = run.steps - decay if stable is None else run.warmup + stable
    y = jnp.asarray(t - begin, float) / max(1, decay)
    floor = options["min_lr_ratio"]
    factor = _above(floor, _fall(options, "decay_type", y, options["num_cycles"]))
    return jnp.where(t < begin, 1.0, jnp.where(t < begin + decay, factor, floor))


def _stable_warmup(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    y = jnp.asarray(t, float) / max(1, run.warmup)
    if options["warmup_type"] == "1-sqrt":  # falls as sqrt(1 - y), where the decay does as sqrt(y)
        return _above(options["min_lr_ratio"], _fall(options, "warmup_type", 1 - y, 0.5))
    return _above(options["min_lr_ratio"], 1 - _fall(options, "warmup_type", y, 0.5))


def _polynomial(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    end = options["lr_end"] / run.rate
    return cast(jax.Array, end + (1 - end) * jnp.maximum(0.0, 1 - x) ** options["power"])


def _inverse_sqrt(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    scale = options["timescale"] or run.warmup or 10_000
    return 1 / jnp.sqrt(jnp.maximum(1.0, (t - run.warmup + scale) / scale))


def _constant(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    return jnp.ones_like(x)


_FLOORS = {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}

SCHEDULES: dict[str, Shape] = {
    "linear": Shape(lambda run, t, x, options: jnp.maximum(0.0, 1 - x), {}),
    "cosine": Shape(
        lambda run, t, x, options: _cosine(x, options["num_cycles"]), {"num_cycles": 0.5}
    ),
    "cosine_with_restarts": Shape(_restarts, {"num_cycles": 1}),
    "cosine_with_min_lr": Shape(_floored, {**_FLOORS}),
    "cosine_warmup_with_min_lr": Shape(
        _floored_ahead, {**_FLOORS, "warmup_lr_rate": None}, _raised
    ),
    "polynomial": Shape(_polynomial, {"lr_end": 1e-7, "power": 1.0}),
    "constant": Shape(_constant, {}),
    "constant_with_warmup": Shape(_constant, {}),
    "inverse_sqrt": Shape(_inverse_sqrt, {"timescale": None}),
    "warmup_stable_decay": Shape(
        _stable_decay,
        {
            "num_decay_steps": None,
            "num_stable_steps": None,
            "warmup_type": "linear",
            "decay_type": "cosine",
            "min_lr_ratio": 0.0,
            "num_cycles": 0.5,
        },
        _stable_warmup,
    ),
}
"""The schedules by name."""
