"""The optimizers a DeepSpeed JSON names, on optax, with DeepSpeed's parameters and defaults."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import optax

from zerojax.config import ConfigError, OptimizerConfig
from zerojax.optim.scaling import (
    scale_by_clamped_trust_ratio,
    scale_by_late_bias_correction,
    scale_by_raw_adam,
    scale_by_root_sum,
)

Rate: TypeAlias = float | optax.Schedule


def named_optimizer(
    config: OptimizerConfig, schedule_or_none: optax.Schedule | None = None
) -> tuple[optax.GradientTransformation, Rate]:
    """The optimizer that a config names.

    With rate r, weight decay d and direction u of the rule (p -= r u):

    - Adam, FusedAdam, CPUAdam, AdamW: u = mhat / (sqrt(vhat) + eps) + d p. With `adam_w_mode`
      false the decay goes into the gradient, g + d p, instead (L2).
    - Lion: u = sign(b1 m + (1 - b1) g) + d p, then m = b2 m + (1 - b2) g.
    - SGD: g + d p, with momentum m = mu m + g, and Nesterov's g + mu m.
    - Adagrad: g + d p over sqrt(sum of squares) + eps.
    - Lamb: u = m / (sqrt(v) + eps) + d p, times clamp(|p| / |u|, min_coeff, max_coeff), times
      sqrt(1 - b2^n) / (1 - b1^n) with `bias_correction`. As in DeepSpeed, the correction comes
      last; `optax.lamb` corrects the moments.

    Args:
      config: type and parameters; those not given have DeepSpeed's defaults.
      schedule_or_none: a rate for each update; without it the rate is the parameter `lr`.

    Returns:
      The transformation, and the rate it uses.

    Raises:
      ConfigError: Nesterov's method without momentum.

    Example:
      >>> tx, rate = named_optimizer(OptimizerConfig(type="AdamW", params={"lr": 3e-4}))
      >>> rate
      0.0003
    """
    params = config.with_defaults()
    rate: Rate = params["lr"] if schedule_or_none is None else schedule_or_none
    parts = _RULES[config.type](params)
    return optax.chain(*parts, optax.scale_by_learning_rate(rate)), rate


Params: TypeAlias = Mapping[str, Any]
Parts: TypeAlias = list[optax.GradientTransformation]


def _decay(params: Params) -> Parts:
    rate = params["weight_decay"]
    return [optax.add_decayed_weights(rate)] if rate else []


def _adam(params: Params) -> Parts:
    b1, b2 = params["betas"]
    rule = optax.scale_by_adam if params["bias_correction"] else scale_by_raw_adam
    adam = rule(b1=b1, b2=b2, eps=params["eps"])
    return [adam, *_decay(params)] if params["adam_w_mode"] else [*_decay(params), adam]


def _lion(params: Params) -> Parts:
    b1, b2 = params["betas"]
    return [optax.scale_by_lion(b1=b1, b2=b2), *_decay(params)]


def _sgd(params: Params) -> Parts:
    mu = params["momentum"]
    if params["nesterov"] and not mu:
        raise ConfigError("optimizer.params.nesterov = true needs momentum; set it above 0")
    trace = [optax.trace(decay=mu, nesterov=params["nesterov"])] if mu else []
    return [*_decay(params), *trace]


def _adagrad(params: Params) -> Parts:
    return [*_decay(params), scale_by_root_sum(eps=params["eps"])]


def _lamb(params: Params) -> Parts:
    b1, b2 = params["betas"]
    late = [scale_by_late_bias_correction(b1, b2)] if params["bias_correction"] else []
    return [
        scale_by_raw_adam(b1, b2, params["eps"], params["eps_inside_sqrt"]),
        *_decay(params),
        scale_by_clamped_trust_ratio(params["min_coeff"], params["max_coeff"]),
        *late,
    ]


_RULES: dict[str, Callable[[Params], Parts]] = {
    "Adam": _adam,
    "AdamW": _adam,
    "FusedAdam": _adam,
    "CPUAdam": _adam,
    "Lion": _lion,
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "Lamb": _lamb,
}
