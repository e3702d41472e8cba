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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


After: TypeAlias = Callable[[Run, jax.Array, jax.Array, Options], jax.Array]
"""Function that returns the fraction of the base rate after the warm-up, from t and x."""


def schedule(name: str, run: Run, options: Options | None = None) -> optax.Schedule:
    """Returns the named schedule.

    Raises:
      ConfigError: The schedule does not have an option, or an option's value is invalid.

    Example:
      >>> rate = schedule("linear", Run(1.0, 2, 6))
      >>> [float(rate(t)) for t in range(7)]
      [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    decay, defaults = SCHEDULES[name]
    chosen = {**defaults, **(options or {})}
    for option in chosen.keys() - defaults.keys():
        raise ConfigError(
            f"lr_scheduler_kwargs: {name} has no {option}; {suggestion(option, defaults)}"
        )
    if chosen.get("lr_end", 0) and chosen["lr_end"] >= run.rate:
        raise ConfigError(
            f"lr_scheduler_kwargs: lr_end = {chosen['lr_end']:g} must be below learning_rate = "
            f"{run.rate:g}"
        )
    decay_steps = max(1, run.steps - run.warmup)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.asarray(count)
        x = jnp.asarray(t - run.warmup, float) / decay_steps
        factor = decay(run, t, x, chosen)
        if name != "constant":
            factor = jnp.where(t < run.warmup, jnp.asarray(t, float) / max(1, run.warmup), factor)
        return run.rate * factor

    return rate


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
        raise ConfigError("lr_scheduler_kwargs: cosine_with_min_lr takes min_lr or min_lr_rate")
    floor = floor_rate / run.rate if floor_factor is None else floor_factor
    return cast(jax.Array, floor + (1 - floor) * _cosine(x, options["num_cycles"]))


def _polynomial(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    end = options["lr_end"] / run.rate
    return cast(jax.Array, end + (1 - end) * jnp.maximum(0.0, 1 - x) ** options["power"])


def _inverse_sqrt(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    scale = options["timescale"] or run.warmup or 10_000
    return 1 / jnp.sqrt(jnp.maximum(1.0, (t - run.warmup + scale) / scale))


def _constant(run: Run, t: jax.Array, x: jax.Array, options: Options) -> jax.Array:
    return jnp.ones_like(x)


SCHEDULES: dict[str, tuple[After, dict[str, float | None]]] = {
    "linear": (lambda run, t, x, options: jnp.maximum(0.0, 1 - x), {}),
    "cosine": (lambda run, t, x, options: _cosine(x, options["num_cycles"]), {"num_cycles": 0.5}),
    "cosine_with_restarts": (_restarts, {"num_cycles": 1}),
    "cosine_with_min_lr": (_floored, {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}),
    "polynomial": (_polynomial, {"lr_end": 1e-7, "power": 1.0}),
    "constant": (_constant, {}),
    "constant_with_warmup": (_constant, {}),
    "inverse_sqrt": (_inverse_sqrt, {"timescale": None}),
}
"""Function of each schedule after its warm-up, and its options with their defaults."""
