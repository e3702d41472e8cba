"""Optimizer and schedule of a run: those that the JSON names, else those of the arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import optax

from zerojax.api import Zero
from zerojax.config import ConfigError, OptimizerConfig, SchedulerConfig, ZeroConfig
from zerojax.config.errors import as_text
from zerojax.optim.decay import no_bias_and_norm
from zerojax.optim.named import Rate, named_optimizer
from zerojax.optim.schedules import Params, Run, schedule_of_transformers
from zerojax.optim.schedules import schedule as rate_of
from zerojax.optim.wrap import configured
from zerojax.plan.state_sharding import DTYPES
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.optimizer_names import OPTIMIZERS, optim_options


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
      ConfigError: ``own`` is passed, and the JSON names an optimizer or a schedule, or an argument
        is set that would have no effect.
    """
    config = zero.config
    if own is not None:
        if problems := [*_replaced(args, config)]:
            raise ConfigError(problems, "Trainer(optimizer=...)")
        return zero.wrap(own)
    options = cast("Params | None", args.lr_scheduler_kwargs)
    base = args.learning_rate
    if config.optimizer is not None:
        base = config.optimizer.with_defaults().get("lr", base)
    rate = config.scheduler or schedule_of_transformers(
        args.lr_scheduler_type, Run(base, args.warmup(steps), steps), options
    )
    tx, learning_rate = _with_rate(args, config, rate)
    return configured(tx, config, learning_rate)


IN_TRANSFORMATION = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim",
    "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio",
)  # fmt: skip
"""The arguments that the user's transformation replaces. transformers applies its schedule to the
user's optimizer, too; optax's have theirs."""


def _replaced(args: TrainingArguments, config: ZeroConfig) -> Iterator[str]:
    """Yields a problem for each setting that the user's transformation replaces."""
    for name in ("optimizer", "scheduler"):
        if getattr(config, name) is not None:
            yield f"{name}: the JSON names one, and Trainer(optimizer=...) another; remove one"
    for name in args.changed(IN_TRANSFORMATION):
        yield (
            f"{name} = {as_text(getattr(args, name))} has no effect on your transformation: "
            'build it in, optax.adamw(schedule_of_transformers("cosine", Run(rate, warmup, '
            "steps))) with the functions of zerojax.optim.schedules, or remove optimizer="
        )


def _with_rate(
    args: TrainingArguments, config: ZeroConfig, rate: SchedulerConfig | optax.Schedule
) -> tuple[optax.GradientTransformation, Rate]:
    """Returns the optimizer of the JSON or the arguments, and its learning rate."""
    if config.optimizer is not None:
        dtype = DTYPES[config.compute_dtype]
        return named_optimizer(config.optimizer, rate, compute_dtype=dtype)
    named, options = OPTIMIZERS[args.optim], optim_options(args.optim, args.optim_args)
    given = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    params = {"lr": args.learning_rate, "weight_decay": args.weight_decay, **options}
    params |= {name: given[name] for name in named.arguments}
    mask = no_bias_and_norm if args.weight_decay else None
    if isinstance(named.form, str):
        own = OptimizerConfig(type=named.form, params=params)
        return named_optimizer(own, rate, weight_decay_mask=mask)
    decay = [optax.add_decayed_weights(args.weight_decay, mask)] if args.weight_decay else []
    learning_rate = rate_of(rate, args.learning_rate) if isinstance(rate, SchedulerConfig) else rate
    rules = named.form(decay, options)
    return optax.chain(*rules, optax.scale_by_learning_rate(learning_rate)), learning_rate
