"""``TrainingArguments``: the settings of a run, with the names of Hugging Face's Trainer."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import BeforeValidator, StrictStr

from zerojax.config.errors import ConfigError, as_text
from zerojax.config.kinds import (
    ABOVE_ZERO,
    AMOUNT,
    BETA,
    FLAG,
    FRACTION,
    INTEGER,
    NON_NEGATIVE,
    POSITIVE,
    TEXT,
    ValueKind,
    choice,
    optional,
)
from zerojax.distributed import log
from zerojax.optim.schedules import OF_TRANSFORMERS
from zerojax.trainer.optimizer_names import ALTERNATIVES, OPTIMIZERS, optimizer_problems
from zerojax.trainer.order import STRATEGIES
from zerojax.trainer.other_arguments import OTHERS, RENAMED, fsdp_options, is_default, sort_out
from zerojax.trainer.read_by_scripts import ReadByScripts

MONITORS = ("tensorboard", "wandb", "csv")

_STAGES = {"no_shard": 0, "shard_grad_op": 2, "full_shard": 3}

_File: TypeAlias = Mapping[str, object] | str | os.PathLike[str]
"""A JSON as a dict or as a path."""

_STRATEGY = choice("no", "steps", "epoch")
_OBJECT = ValueKind(
    "an object, or its JSON as a string",
    Annotated[dict[str, Any], BeforeValidator(lambda x: _parsed(x))],
)
_CONFIG = ValueKind("any value", Annotated[Any, BeforeValidator(lambda x: _parsed(x))])
_PATH = ValueKind("a path", Annotated[StrictStr, BeforeValidator(lambda x: _text(x))])
_NAMES = ValueKind(
    "a name or a list of names",
    Annotated[list[StrictStr], BeforeValidator(lambda x: _listed(x))],
)


def _text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _parsed(value: object) -> object:
    """Parses an object in a string, as on a command line; other strings are paths."""
    is_object = isinstance(value, str) and value.lstrip().startswith("{")
    return json.loads(value) if is_object else value  # type: ignore[arg-type]


def _listed(value: object) -> object:
    if value is None or value is False:
        return []
    if isinstance(value, str):
        return value.split()
    return [*value] if isinstance(value, tuple) else value


@dataclass(frozen=True, init=False, kw_only=True)
class TrainingArguments(ReadByScripts):
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
      learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, optim, optim_args: The
        optimizer, see :mod:`zerojax.trainer.optimizer_names`.
      max_grad_norm: The largest global norm of a gradient; 0 turns clipping off.
      label_smoothing_factor: The smoothing of a ready loss, see
        :mod:`zerojax.models.losses`.
      num_train_epochs: Epochs; 1.5 ends in the middle of the second.
      max_steps: The number of updates; if above 0, it overrides ``num_train_epochs``.
      lr_scheduler_type, lr_scheduler_kwargs: The schedule, see :mod:`zerojax.optim.schedules`. The
        kwargs, like ``deepspeed`` and ``fsdp_config``, may be a string with the JSON of an object.
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
      train_sampling_strategy, length_column_name: The order of the rows, see
        :mod:`zerojax.trainer.order`, and the column of their lengths. ``group_by_length`` is the
        strategy of that name.
      remove_unused_columns: Whether non-numeric columns are dropped; each is logged once.
      label_names: The fields that are labels.
      disable_tqdm: Whether the progress bar is disabled.
      deepspeed: The DeepSpeed JSON, as a path or a dict.
      fsdp: In place of ``deepspeed``: "full_shard" (stage 3), "shard_grad_op" (2) or "no_shard",
        optionally with "offload". Without either, plain data parallelism (stage 0).
      fsdp_config: Options of ``fsdp``, as a path or a dict; its "activation_checkpointing" sets
        ``gradient_checkpointing``.
      do_train, do_eval, do_predict, resume_from_checkpoint: For scripts, which read them; Trainer
        does not. ``do_eval`` is also true where ``eval_strategy`` is set.
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

    output_dir: Annotated[str, _PATH] = "trainer_output"
    overwrite_output_dir: Annotated[bool, FLAG] = False
    per_device_train_batch_size: Annotated[int, POSITIVE] = 8
    per_device_eval_batch_size: Annotated[int, POSITIVE] = 8
    gradient_accumulation_steps: Annotated[int, POSITIVE] = 1
    learning_rate: Annotated[float, AMOUNT] = 5e-5
    weight_decay: Annotated[float, AMOUNT] = 0.0
    adam_beta1: Annotated[float, BETA] = 0.9
    adam_beta2: Annotated[float, BETA] = 0.999
    adam_epsilon: Annotated[float, AMOUNT] = 1e-8
    optim: Annotated[str, choice(*OPTIMIZERS, *ALTERNATIVES)] = "adamw_torch"
    optim_args: Annotated[str | None, optional(TEXT)] = None
    max_grad_norm: Annotated[float, AMOUNT] = 1.0
    label_smoothing_factor: Annotated[float, BETA] = 0.0
    num_train_epochs: Annotated[float, ABOVE_ZERO] = 3.0
    max_steps: Annotated[int, INTEGER] = -1
    lr_scheduler_type: Annotated[str, choice(*OF_TRANSFORMERS)] = "linear"
    lr_scheduler_kwargs: Annotated[Mapping[str, object] | str | None, optional(_OBJECT)] = None
    warmup_steps: Annotated[float, AMOUNT] = 0
    warmup_ratio: Annotated[float, optional(FRACTION)] = 0.0
    bf16: Annotated[bool, FLAG] = False
    fp16: Annotated[bool, FLAG] = False
    gradient_checkpointing: Annotated[bool, optional(FLAG)] = False
    logging_strategy: Annotated[str, _STRATEGY] = "steps"
    logging_steps: Annotated[float, ABOVE_ZERO] = 500
    logging_first_step: Annotated[bool, FLAG] = False
    eval_strategy: Annotated[str, _STRATEGY] = "no"
    eval_steps: Annotated[float | None, optional(ABOVE_ZERO)] = None
    eval_on_start: Annotated[bool, FLAG] = False
    eval_delay: Annotated[float, AMOUNT] = 0
    prediction_loss_only: Annotated[bool, FLAG] = False
    save_strategy: Annotated[str, choice("no", "steps", "epoch", "best")] = "steps"
    save_steps: Annotated[float, ABOVE_ZERO] = 500
    save_total_limit: Annotated[int | None, optional(POSITIVE)] = None
    load_best_model_at_end: Annotated[bool, FLAG] = False
    metric_for_best_model: Annotated[str, optional(TEXT)] = "loss"
    greater_is_better: Annotated[bool | None, optional(FLAG)] = None
    report_to: Annotated[list[str], _NAMES] = field(default_factory=list)
    logging_dir: Annotated[str | None, optional(_PATH)] = None
    run_name: Annotated[str | None, optional(TEXT)] = None
    project: Annotated[str | None, optional(TEXT)] = None
    seed: Annotated[int, NON_NEGATIVE] = 42
    data_seed: Annotated[int | None, optional(NON_NEGATIVE)] = None
    dataloader_drop_last: Annotated[bool, FLAG] = False
    train_sampling_strategy: Annotated[str, choice(*STRATEGIES)] = "random"
    group_by_length: Annotated[bool, FLAG] = False
    length_column_name: Annotated[str, TEXT] = "length"
    remove_unused_columns: Annotated[bool, FLAG] = True
    label_names: Annotated[list[str], _NAMES] = field(default_factory=lambda: ["labels"])
    disable_tqdm: Annotated[bool, optional(FLAG)] = False
    deepspeed: Annotated[_File | None, _CONFIG] = None
    fsdp: Annotated[list[str], _NAMES] = field(default_factory=list)
    fsdp_config: Annotated[_File | None, _CONFIG] = None
    do_train: Annotated[bool, FLAG] = False
    do_eval: Annotated[bool, FLAG] = False
    do_predict: Annotated[bool, FLAG] = False
    resume_from_checkpoint: Annotated[str | None, optional(_PATH)] = None
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __init__(self, output_dir: str = "trainer_output", **arguments: object) -> None:
        given = {"output_dir": output_dir} | {RENAMED.get(k, k): v for k, v in arguments.items()}
        values, kinds = _defaults(type(self)), get_type_hints(type(self), include_extras=True)
        others = {name: value for name, value in given.items() if name not in values}
        problems, unused = sort_out(others, OTHERS, values)
        for name in filter(values.__contains__, given):
            try:
                values[name] = kinds[name].__metadata__[0].check(given[name])
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        vars(self).update(values, given=frozenset(given), others=others)
        options = fsdp_options(self.fsdp_config if self.fsdp else None)
        unused += options.unused
        self._settle(options.remat)
        problems += [*options.problems, *self._contradictions()]
        if problems:
            raise ConfigError(problems, "TrainingArguments")
        if self.fsdp_config and not self.fsdp:
            unused.append("fsdp_config (fsdp is not given)")
        if self.eval_strategy != "steps" and self.eval_steps is not None:
            unused.append(f'eval_steps (eval_strategy is "{self.eval_strategy}")')
        if unused:
            log.warning("TrainingArguments without effect here: %s", "; ".join(unused))

    @classmethod
    def of(cls, given: object) -> TrainingArguments:
        """Converts ``transformers.TrainingArguments``, or a class derived from them.

        The values that differ from transformers' defaults are taken; fields of a class of yours
        are left out.

        Args:
          given: Their arguments; ``TrainingArguments`` are returned unchanged, and None stands for
            the defaults.

        Raises:
          ConfigError: A value is not supported.
          TypeError: The arguments are of another class.
        """
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        bases = [c for c in type(given).__mro__ if c.__module__.split(".")[0] == "transformers"]
        if not any(c.__name__ == "TrainingArguments" for c in bases):
            raise TypeError(
                f"args: {type(given).__module__}.{type(given).__name__} is neither "
                "zerojax.TrainingArguments nor transformers.TrainingArguments; write "
                "args=zerojax.TrainingArguments(...)"
            )
        theirs: Any = given
        names = {spec.name for c in bases if is_dataclass(c) for spec in fields(c)}
        values = {k: v for k, v in theirs.to_dict().items() if k in names}
        default = _defaults(cls)
        return cls(
            **{k: v for k, v in values.items() if not is_default(k, v) and v != default.get(k)}
        )

    def _settle(self, remat: bool) -> None:
        """Fills in values that depend on other arguments."""
        metric, greater = self.metric_for_best_model or "loss", self.greater_is_better
        reports = [] if self.report_to == ["none"] else self.report_to
        if reports == ["all"]:
            reports = [n for n in ("tensorboard", "wandb") if importlib.util.find_spec(n)]
        vars(self).update(
            gradient_checkpointing=self.gradient_checkpointing or remat,
            train_sampling_strategy=(
                "group_by_length" if self.group_by_length else self.train_sampling_strategy
            ),
            metric_for_best_model=metric if metric.startswith("eval_") else f"eval_{metric}",
            greater_is_better=not metric.endswith("loss") if greater is None else greater,
            report_to=reports,
            label_names=self.label_names or ["labels"],
            do_eval=self.do_eval or self.eval_strategy != "no",
        )

    def _contradictions(self) -> Iterator[str]:
        if self.bf16 and self.fp16:
            yield "bf16 and fp16 are both true; set one to false"
        yield from optimizer_problems(self.optim, self.optim_args)
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
            yield "fsdp and deepspeed are both given; remove one"
        if self.save_strategy == "best":
            if self.eval_strategy == "no":
                yield 'save_strategy is "best" and eval_strategy "no"; set eval_strategy'
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

    def changed(self, names: Iterable[str]) -> Iterator[str]:
        """Yields those of some arguments that have neither the default here nor transformers'."""
        defaults = _defaults(type(self))
        for name in names:
            value = getattr(self, name)
            if value != defaults[name] and not is_default(name, value):
                yield name

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


def _defaults(cls: type[TrainingArguments]) -> dict[str, object]:
    return {
        spec.name: spec.default if spec.default_factory is MISSING else spec.default_factory()
        for spec in fields(cls)
        if spec.init
    }
