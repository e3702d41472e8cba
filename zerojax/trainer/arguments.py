"""``TrainingArguments``: the settings of a run, with the names of Hugging Face's Trainer."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictStr

from zerojax.config.errors import ConfigError, as_text, closest, hint
from zerojax.config.keys.row import (
    ABOVE_ZERO,
    AMOUNT,
    ANYTHING,
    BETA,
    FLAG,
    FRACTION,
    INTEGER,
    NON_NEGATIVE,
    OBJECT,
    POSITIVE,
    TEXT,
    ValueKind,
    choice,
    optional,
)
from zerojax.distributed import log
from zerojax.trainer.other_arguments import REFUSED, RENAMED, WITHOUT_EFFECT, fsdp_options
from zerojax.trainer.schedules import SCHEDULES

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"), "AdamW"),
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "lion_32bit": "Lion",
}
"""Type of optimizer in the DeepSpeed JSON for each value of Hugging Face's ``optim``."""

MONITORS = ("tensorboard", "wandb", "csv")

_STAGES = {"no_shard": 0, "shard_grad_op": 2, "full_shard": 3}

_STRATEGY = choice("no", "steps", "epoch")
_PATH = ValueKind("a path", Annotated[StrictStr, BeforeValidator(lambda x: _text(x))])
_NAMES = ValueKind(
    "a name or a list of names",
    Annotated[tuple[StrictStr, ...], BeforeValidator(lambda x: _listed(x))],
)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _listed(value: object) -> object:
    if value is None or value is False:
        return ()
    return tuple(value.split()) if isinstance(value, str) else value


def _argument(kind: ValueKind, default: object) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, init=False, kw_only=True)
class TrainingArguments:
    """The arguments of a run, with the names and defaults of Hugging Face's Trainer.

    Hugging Face's other arguments are accepted, too: an argument without effect in zerojax is
    logged with the reason, and an unsupported one raises an error that names the alternative. With
    ``deepspeed``, a key of the JSON that is "auto" or missing takes the argument's value.

    Args:
      output_dir: The folder of checkpoints (``checkpoints/STEP``) and logs.
      **arguments: Any of the attributes below, by name.

    Attributes:
      overwrite_output_dir: Whether a new run removes the checkpoints of an earlier one.
      per_device_train_batch_size: Rows of one device in one micro-batch.
      per_device_eval_batch_size: Rows of one device in one evaluation batch.
      gradient_accumulation_steps: Micro-batches per update.
      learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, optim: The optimizer.
      max_grad_norm: The largest global norm of a gradient; 0 turns clipping off.
      num_train_epochs: Epochs; 1.5 ends in the middle of the second.
      max_steps: The number of updates; if above 0, it overrides ``num_train_epochs``.
      lr_scheduler_type, lr_scheduler_kwargs: The schedule, see :mod:`zerojax.trainer.schedules`.
      warmup_steps, warmup_ratio: Updates of the warm-up, or their fraction of all updates.
      bf16, fp16: The compute dtype; master weights stay float32.
      gradient_checkpointing: Whether the backward pass recomputes the model's blocks; sets the
        model's option ``remat``.
      logging_strategy, logging_steps, logging_first_step: When the loss is logged. A number of
        steps below 1 is a fraction of all steps.
      eval_strategy, eval_steps, eval_on_start, eval_delay: When ``eval_dataset`` is evaluated.
      prediction_loss_only: Whether evaluations skip predictions and ``compute_metrics``.
      save_strategy, save_steps, save_total_limit: When checkpoints are saved, and how many are
        kept; "best" saves after each evaluation with a new best ``metric_for_best_model``.
      load_best_model_at_end, metric_for_best_model, greater_is_better: Whether ``train`` ends with
        the parameters of the best checkpoint.
      report_to: "tensorboard", "wandb", "csv", "all" (whichever of "tensorboard" and "wandb" are
        installed) or "none".
      logging_dir, run_name, project: The folder of logs, the run's name in it, and the project in
        wandb.
      seed, data_seed: The seed of parameters and dropout, and the seed of the row order.
      dataloader_drop_last: Whether rows beyond the last full micro-batch of an epoch are dropped.
        By default they form a smaller last update.
      remove_unused_columns: Whether non-numeric columns are dropped; each is logged once.
      label_names: The fields that are labels.
      disable_tqdm: Whether the progress bar is disabled.
      deepspeed: The DeepSpeed JSON, as a path or a dict.
      fsdp: In place of ``deepspeed``: "full_shard" (stage 3), "shard_grad_op" (2) or "no_shard",
        optionally with "offload". Without either, plain data parallelism (stage 0).
      fsdp_config: Options of ``fsdp``, as a path or a dict; its "activation_checkpointing" sets
        ``gradient_checkpointing``.
      use_cpu: Whether the run must be on CPUs; set ``JAX_PLATFORMS=cpu`` to run there.
      given: The names of the arguments that were passed.

    Raises:
      ConfigError: Values are invalid, names unknown or arguments contradictory; the message has a
        line for each problem.

    Example:
      >>> TrainingArguments("out", max_steps=100, warmup_ratio=0.06).warmup(100)
      6
      >>> TrainingArguments("out", learning_rat=1e-4)
      Traceback (most recent call last):
      zerojax.config.errors.ConfigError: TrainingArguments: learning_rat: unknown argument; \
did you mean `learning_rate`?
    """

    output_dir: str = _argument(_PATH, "trainer_output")
    overwrite_output_dir: bool = _argument(FLAG, False)
    per_device_train_batch_size: int = _argument(POSITIVE, 8)
    per_device_eval_batch_size: int = _argument(POSITIVE, 8)
    gradient_accumulation_steps: int = _argument(POSITIVE, 1)
    learning_rate: float = _argument(AMOUNT, 5e-5)
    weight_decay: float = _argument(AMOUNT, 0.0)
    adam_beta1: float = _argument(BETA, 0.9)
    adam_beta2: float = _argument(BETA, 0.999)
    adam_epsilon: float = _argument(AMOUNT, 1e-8)
    optim: str = _argument(choice(*OPTIMIZERS), "adamw_torch")
    max_grad_norm: float = _argument(AMOUNT, 1.0)
    num_train_epochs: float = _argument(ABOVE_ZERO, 3.0)
    max_steps: int = _argument(INTEGER, -1)
    lr_scheduler_type: str = _argument(choice(*SCHEDULES), "linear")
    lr_scheduler_kwargs: Mapping[str, object] | None = _argument(optional(OBJECT), None)
    warmup_steps: float = _argument(AMOUNT, 0)
    warmup_ratio: float = _argument(optional(FRACTION), 0.0)
    bf16: bool = _argument(FLAG, False)
    fp16: bool = _argument(FLAG, False)
    gradient_checkpointing: bool = _argument(optional(FLAG), False)
    logging_strategy: str = _argument(_STRATEGY, "steps")
    logging_steps: float = _argument(ABOVE_ZERO, 500)
    logging_first_step: bool = _argument(FLAG, False)
    eval_strategy: str = _argument(_STRATEGY, "no")
    eval_steps: float | None = _argument(optional(ABOVE_ZERO), None)
    eval_on_start: bool = _argument(FLAG, False)
    eval_delay: float = _argument(AMOUNT, 0)
    prediction_loss_only: bool = _argument(FLAG, False)
    save_strategy: str = _argument(choice("no", "steps", "epoch", "best"), "steps")
    save_steps: float = _argument(ABOVE_ZERO, 500)
    save_total_limit: int | None = _argument(optional(POSITIVE), None)
    load_best_model_at_end: bool = _argument(FLAG, False)
    metric_for_best_model: str = _argument(optional(TEXT), None)
    greater_is_better: bool = _argument(optional(FLAG), None)
    report_to: tuple[str, ...] = _argument(_NAMES, ())
    logging_dir: str | None = _argument(optional(_PATH), None)
    run_name: str | None = _argument(optional(TEXT), None)
    project: str | None = _argument(optional(TEXT), None)
    seed: int = _argument(NON_NEGATIVE, 42)
    data_seed: int | None = _argument(optional(NON_NEGATIVE), None)
    dataloader_drop_last: bool = _argument(FLAG, False)
    remove_unused_columns: bool = _argument(FLAG, True)
    label_names: tuple[str, ...] = _argument(_NAMES, ("labels",))
    disable_tqdm: bool = _argument(optional(FLAG), False)
    deepspeed: str | os.PathLike[str] | Mapping[str, object] | None = field(
        default=None, metadata={"kind": ANYTHING}
    )
    fsdp: tuple[str, ...] = _argument(_NAMES, ())
    fsdp_config: str | os.PathLike[str] | Mapping[str, object] | None = field(
        default=None, metadata={"kind": ANYTHING}
    )
    use_cpu: bool = _argument(FLAG, False)
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __init__(self, output_dir: str = "trainer_output", **arguments: object) -> None:
        given = {"output_dir": output_dir} | {RENAMED.get(k, k): v for k, v in arguments.items()}
        init_fields = {spec.name: spec for spec in fields(self) if spec.init}
        problems = [*_argument_problems(given, init_fields)]
        for name, spec in init_fields.items():
            value = given.get(name, spec.default)
            try:
                value = spec.metadata["kind"].check(value)
            except ConfigError as error:
                problems.append(f"{name}: {error}")
                value = spec.default
            object.__setattr__(self, name, value)
        object.__setattr__(self, "given", frozenset(given))
        options = fsdp_options(self.fsdp_config if self.fsdp else None)
        problems += options.problems
        self._settle(options.remat)
        problems += self._contradictions()
        if problems:
            raise ConfigError(problems, "TrainingArguments")
        unused = [f"{name} ({WITHOUT_EFFECT[name]})" for name in given if name in WITHOUT_EFFECT]
        unused += options.unused
        if self.fsdp_config and not self.fsdp:
            unused.append("fsdp_config (fsdp is not given)")
        if self.eval_strategy != "steps" and self.eval_steps is not None:
            unused.append(f'eval_steps (eval_strategy is "{self.eval_strategy}")')
        if unused:
            log.warning("TrainingArguments without effect here: %s", "; ".join(unused))

    @classmethod
    def of(cls, given: TrainingArguments | None) -> TrainingArguments:
        """Returns the arguments unchanged, or the defaults for None.

        Raises:
          TypeError: The arguments are of another class.
        """
        given = cls() if given is None else given
        if not isinstance(given, cls):
            raise TypeError(
                f"args: {type(given).__module__}.{type(given).__name__} is not "
                "zerojax.TrainingArguments, which takes the same arguments"
            )
        return given

    def _settle(self, remat: bool) -> None:
        """Fills in values that depend on other arguments."""
        if remat:
            object.__setattr__(self, "gradient_checkpointing", True)
        metric = self.metric_for_best_model or "loss"
        metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        object.__setattr__(self, "metric_for_best_model", metric)
        if self.greater_is_better is None:
            object.__setattr__(self, "greater_is_better", not metric.endswith("loss"))
        report = self.report_to
        if report == ("all",):
            report = tuple(n for n in ("tensorboard", "wandb") if importlib.util.find_spec(n))
        object.__setattr__(self, "report_to", () if report == ("none",) else report)
        object.__setattr__(self, "label_names", self.label_names or ("labels",))

    def _contradictions(self) -> Iterator[str]:
        if self.bf16 and self.fp16:
            yield "bf16 and fp16 are both true; choose one"
        for name in self.report_to:
            if name not in MONITORS:
                yield f'report_to: {as_text(name)} is none of {", ".join(MONITORS)}, "all", "none"'
        for name in self.fsdp:
            if name not in (*_STAGES, "auto_wrap", "offload"):
                yield (
                    f"fsdp: {as_text(name)} is none of {', '.join(_STAGES)}, auto_wrap, offload; "
                    'for hybrid sharding pass deepspeed={"zero_optimization": {"stage": 3, '
                    '"mics_shard_size": 8}}'
                )
        if self.fsdp and self.deepspeed is not None:
            yield "fsdp and deepspeed are both given; keep one"
        if self.save_strategy == "best":
            if self.eval_strategy == "no":
                yield 'save_strategy is "best", and eval_strategy "no"; set eval_strategy'
            return
        if not self.load_best_model_at_end:
            return
        if self.eval_strategy != self.save_strategy or self.save_strategy == "no":
            yield (
                "load_best_model_at_end needs an evaluation before each save: eval_strategy is "
                f'"{self.eval_strategy}", save_strategy "{self.save_strategy}"; give both the same'
            )
        elif self.save_strategy == "steps" and self.save_steps % (self.eval_steps or
                                                                  self.logging_steps):  # fmt: skip
            yield (
                "load_best_model_at_end needs an evaluation before each save: save_steps = "
                f"{self.save_steps:g} is no multiple of eval_steps = "
                f"{self.eval_steps or self.logging_steps:g}"
            )

    @property
    def stage(self) -> int:
        """ZeRO stage that ``fsdp`` selects."""
        return max((_STAGES[name] for name in self.fsdp if name in _STAGES), default=0)

    def warmup(self, steps: int) -> int:
        """Returns the number of warm-up updates in a run of ``steps`` updates."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(steps * (self.warmup_steps or self.warmup_ratio or 0.0))

    def every(self, event: str, steps: int, epoch: int) -> int:
        """Returns the number of updates between two events of a kind, or 0 if there are none.

        Args:
          event: "logging", "eval" or "save".
          steps: Updates of the run.
          epoch: Updates of an epoch.
        """
        strategy = getattr(self, f"{event}_strategy")
        if strategy != "steps":
            return epoch if strategy == "epoch" else 0
        number = getattr(self, f"{event}_steps") or self.logging_steps
        return math.ceil(number * steps) if number < 1 else int(number)


def _argument_problems(given: Mapping[str, object], own: Iterable[str]) -> Iterator[str]:
    """Yields a problem for each argument that is unknown, or that zerojax refuses."""
    known = [*own, *WITHOUT_EFFECT, *REFUSED]
    for name, value in given.items():
        accepted, reason = REFUSED.get(name, ((), ""))
        if reason and value not in accepted:
            yield f"{name} = {as_text(value)} is not supported: {reason}"
        elif name not in known:
            yield f"{name}: unknown argument; {hint(name, closest(name, known), 'take it out')}"
