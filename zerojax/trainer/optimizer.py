"""Optimizer and schedule of a run: those that the JSON names, else those of the arguments."""

from __future__ import annotations

import optax

from zerojax.api import Zero
from zerojax.config import ConfigError, OptimizerConfig
from zerojax.config.keys.named_types import NAMED_TYPES
from zerojax.experimental.choice import OPTIMIZERS as EXPERIMENTAL
from zerojax.optim.decay import no_bias_and_norm
from zerojax.optim.named import named_optimizer
from zerojax.optim.wrap import features, wrap
from zerojax.trainer.arguments import OPTIMIZERS, TrainingArguments
from zerojax.trainer.schedules import Run, schedule


def optimizer_of(
    args: TrainingArguments,
    zero: Zero,
    steps: int,
    own: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Returns the run's optimizer, with the config's clipping and loss scale.

    As in transformers, weight decay applies to all parameters with the JSON's optimizer, but not to
    biases and norms with the optimizer of the arguments. Either works with either schedule.

    Args:
      args: The arguments.
      zero: The ``Zero`` of the resolved config.
      steps: Updates of the run.
      own: The user's optimizer, which replaces both.

    Raises:
      ConfigError: ``own`` is passed, and the JSON names an optimizer or a schedule.
    """
    config = zero.config
    if own is not None:
        for name in ("optimizer", "scheduler"):
            if getattr(config, name) is not None:
                raise ConfigError(
                    f"{name}: the JSON names one, and Trainer(optimizer=...) another; keep one"
                )
        return zero.wrap(own)
    named = config.optimizer or _named(args)
    rate = config.scheduler or schedule(
        args.lr_scheduler_type,
        Run(named.with_defaults().get("lr", args.learning_rate), args.warmup(steps), steps),
        args.lr_scheduler_kwargs,
    )
    is_masked = config.optimizer is None and args.weight_decay
    mask = no_bias_and_norm if is_masked else None
    tx, learning_rate = named_optimizer(
        named, rate, weight_decay_mask=mask, further_rules=EXPERIMENTAL
    )
    return wrap(tx, learning_rate=learning_rate, **features(config))


def _named(args: TrainingArguments) -> OptimizerConfig:
    kind = OPTIMIZERS[args.optim]
    params = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    known = NAMED_TYPES["optimizer"][kind]
    return OptimizerConfig(type=kind, params={k: v for k, v in params.items() if k in known})
