"""The optimizers that a DeepSpeed JSON names, built on optax with DeepSpeed's defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import optax
from jax.typing import DTypeLike

from zerojax.config import ConfigError, OptimizerConfig, SchedulerConfig
from zerojax.distributed import log
from zerojax.optim.decay import Mask, no_bias_and_norm
from zerojax.optim.muon import muon_or_adam, scale_by_orthogonal_momentum
from zerojax.optim.scaling import (
    Beta,
    scale_by_clamped_trust_ratio,
    scale_by_late_bias_correction,
    scale_by_raw_adam,
    scale_by_root_sum,
    with_beta,
)
from zerojax.optim.schedules import SECOND_BETA, momentum_schedule, schedule

Rate: TypeAlias = float | optax.Schedule


def named_optimizer(
    config: OptimizerConfig,
    scheduler: SchedulerConfig | optax.Schedule | None = None,
    *,
    weight_decay_mask: Mask | None = None,
    compute_dtype: DTypeLike | None = None,
) -> tuple[optax.GradientTransformation, Rate]:
    """Returns the optimizer that a config names, with its schedule.

    With rate r, weight decay d, and the rule's direction u, so that p -= r u:

    - Adam, FusedAdam, CPUAdam, AdamW: u = mhat / (sqrt(vhat) + eps) + d p. With `adam_w_mode`
      false the decay is added to the gradient instead, g + d p (L2).
    - Lion: u = sign(b1 m + (1 - b1) g) + d p, then m = b2 m + (1 - b2) g.
    - SGD: g + d p, with momentum m = mu m + g, and Nesterov's g + mu m.
    - Adagrad: g + d p over sqrt(sum of squares) + eps.
    - Lamb: u = m / (sqrt(v) + eps) + d p, times clamp(|p| / |u|, min_coeff, max_coeff), times
      sqrt(1 - b2^n) / (1 - b1^n) with `bias_correction`. As in DeepSpeed, the correction comes
      last; `optax.lamb` corrects the moments, and does not clamp.
    - Muon: for matrices u = NS(m) sqrt(max(1, out / in)) + d p at the rate `muon_lr`, see
      `zerojax.optim.muon`; AdamW at the rate `adam_lr` for other parameters. Both rates default to
      `lr`, and without `lr` to 0.02 and 3e-4.

    The rules of Adam, Lion and SGD come from optax, and differ from torch's and DeepSpeed's only in
    rounding: optax computes 1 - b2^n in float32, 1e-5 off (relative) at the first update. zerojax
    has its own Adagrad, Lamb and Muon, since optax has other formulas.

    A OneCycle schedule with `cycle_momentum` moves the first beta of Adam, Lion and Lamb, by the
    count in the rule's state, and sets the second to 0.99. As in DeepSpeed, optimizers without
    betas (SGD, Adagrad, Muon) keep their momentum, with a warning.

    Args:
      config: The type and its parameters; omitted ones have DeepSpeed's defaults.
      scheduler: A schedule by name, or any function from the number of completed updates to a rate,
        for all parameters; without a schedule the rate is the parameter `lr`.
      weight_decay_mask: The parameters that decay, as optax's mask: a tree of bools or a function
        from the parameters to such a tree. Replaces the parameter of the same name, which is
        "all", or "no_bias_and_norm" for :func:`zerojax.optim.decay.no_bias_and_norm`.
      compute_dtype: The dtype in which Muon orthogonalizes; None for that of the parameters.

    Returns:
      The transformation, and its learning rate; for Muon the rate of the matrices.

    Raises:
      ConfigError: Nesterov's method without momentum.

    Example:
      >>> tx, rate = named_optimizer(OptimizerConfig(type="AdamW", params={"lr": 3e-4}))
      >>> rate
      0.0003
    """
    params = config.with_defaults()
    setting = Setting(
        params=params,
        given=config.params,
        scheduler=scheduler,
        betas=_betas(config, scheduler),
        decay=_decay(params, weight_decay_mask),
    )
    if config.type == "Muon":
        return _muon(setting, compute_dtype)
    rate = setting.rate(params["lr"])
    tx = optax.chain(*_RULES[config.type](setting), optax.scale_by_learning_rate(rate))
    return tx, rate


Transformations: TypeAlias = list[optax.GradientTransformation]


@dataclass(frozen=True)
class Setting:
    """The inputs of a rule.

    Attributes:
      params: The parameters, with DeepSpeed's defaults.
      given: The parameters that the config sets.
      scheduler: The schedule of `named_optimizer`.
      betas: The betas; the first may be a schedule.
      decay: The transformation that adds decayed weights, in a list; empty without weight decay.
    """

    params: Mapping[str, Any]
    given: Mapping[str, Any]
    scheduler: SchedulerConfig | optax.Schedule | None
    betas: tuple[Beta, ...]
    decay: Transformations

    def rate(self, base_lr: float) -> Rate:
        if isinstance(self.scheduler, SchedulerConfig):
            return schedule(self.scheduler, base_lr)
        return base_lr if self.scheduler is None else self.scheduler


Rule: TypeAlias = Callable[[Setting], Transformations]
"""Function from a setting to the transformations that turn a gradient into a direction."""


def _betas(
    config: OptimizerConfig, scheduler: SchedulerConfig | optax.Schedule | None
) -> tuple[Beta, ...]:
    momentum = momentum_schedule(scheduler) if isinstance(scheduler, SchedulerConfig) else None
    if momentum is not None and config.type in _WITH_BETAS:
        return momentum, SECOND_BETA
    if momentum is not None and log.is_first():
        warnings.warn(
            f"scheduler.params.cycle_momentum has no effect: {config.type} has no betas to cycle; "
            "set it to false",
            stacklevel=3,
        )
    return cast("tuple[Beta, ...]", config.with_defaults().get("betas", ()))


def _decay(params: Mapping[str, Any], mask: Mask | None) -> Transformations:
    rate = params["weight_decay"]
    if rate:
        named = no_bias_and_norm if params["weight_decay_mask"] == "no_bias_and_norm" else None
        return [optax.add_decayed_weights(rate, named if mask is None else mask)]
    if (mask is not None or params["weight_decay_mask"] != "all") and log.is_first():
        warnings.warn("weight_decay_mask has no effect: weight_decay is 0", stacklevel=3)
    return []


def _adam(s: Setting) -> Transformations:
    b1, b2 = s.betas
    rule = optax.scale_by_adam if s.params["bias_correction"] else scale_by_raw_adam
    adam = with_beta(lambda b: rule(b1=b, b2=b2, eps=s.params["eps"]), b1)
    return [adam, *s.decay] if s.params["adam_w_mode"] else [*s.decay, adam]


def _lion(s: Setting) -> Transformations:
    b1, b2 = s.betas
    return [with_beta(lambda b: optax.scale_by_lion(b1=b, b2=b2), b1), *s.decay]


def _sgd(s: Setting) -> Transformations:
    mu, nesterov = s.params["momentum"], s.params["nesterov"]
    if nesterov and not mu:
        raise ConfigError("optimizer.params.nesterov = true needs momentum; set it above 0")
    trace = [optax.trace(decay=mu, nesterov=nesterov)] if mu else []
    return [*s.decay, *trace]


def _lamb(s: Setting) -> Transformations:
    b1, b2 = s.betas
    params = s.params
    correction = [scale_by_late_bias_correction(b1, b2)] if params["bias_correction"] else []
    return [
        with_beta(lambda b: scale_by_raw_adam(b, b2, params["eps"], params["eps_inside_sqrt"]), b1),
        *s.decay,
        scale_by_clamped_trust_ratio(params["min_coeff"], params["max_coeff"]),
        *correction,
    ]


def _muon(s: Setting, dtype: DTypeLike | None) -> tuple[optax.GradientTransformation, Rate]:
    b1, b2 = s.betas
    rates = [
        s.rate(next((s.given[k] for k in (key, "lr") if s.given.get(k) is not None), default))
        for key, default in (("muon_lr", s.params["lr"]), ("adam_lr", 3e-4))
    ]
    rules = (
        scale_by_orthogonal_momentum(s.params["momentum"], dtype=dtype),
        optax.scale_by_adam(b1=b1, b2=b2, eps=s.params["eps"]),
    )
    muon, adam = (
        optax.chain(rule, *s.decay, optax.scale_by_learning_rate(rate))
        for rule, rate in zip(rules, rates, strict=True)
    )
    return muon_or_adam(muon, adam), rates[0]


_ADAMS = ("Adam", "AdamW", "FusedAdam", "CPUAdam")
_WITH_BETAS = {*_ADAMS, "Lion", "Lamb"}

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ADAMS, _adam),
    "Lion": _lion,
    "SGD": _sgd,
    "Adagrad": lambda s: [*s.decay, scale_by_root_sum(eps=s.params["eps"])],
    "Lamb": _lamb,
}
