"""Config of a run, from its arguments and a DeepSpeed JSON, if there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from zerojax.config.batch import stages_of
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.files import source_of
from zerojax.config.keys import KEYS, rename
from zerojax.config.load import as_json
from zerojax.config.named_types import NAMED_TYPES
from zerojax.config.row import ZERO
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.optimizer_names import OPTIMIZERS

_ADAMW = ("adamw", "adam", "fusedadam", "cpuadam")  # types of one formula by default


class Entry(NamedTuple):
    """Value of one key of the JSON according to the arguments.

    Attributes:
      path: The key, dotted.
      value: The value of the key.
      names: The arguments that determine the value; empty if the value only replaces "auto".
    """

    path: str
    value: object
    names: tuple[str, ...] = ()


def resolved(
    args: TrainingArguments, *, world: int, steps: int, hidden_size: int | None = None
) -> dict[str, object]:
    """Returns a config in DeepSpeed's format, for :func:`zerojax.zero`.

    Every "auto" that transformers' integration resolves (``integrations/deepspeed.py``) takes the
    value of the arguments. So does a missing key whose DeepSpeed default would override an
    argument. Without ``hidden_size``, an "auto" that depends on it is left to the loader.

    Args:
      args: The arguments.
      world: Data-parallel devices.
      steps: Updates of the run.
      hidden_size: The width of the model.

    Raises:
      ConfigError: A value of the JSON contradicts an argument; the message names both.

    Example:
      >>> args = TrainingArguments("out", learning_rate=1e-4, max_grad_norm=0.5, deepspeed={
      ...     "gradient_clipping": "auto", "optimizer": {"type": "Lion", "params": {"lr": "auto"}}})
      >>> config = resolved(args, world=8, steps=100)
      >>> config["gradient_clipping"], config["optimizer"]["params"]["lr"]
      (0.5, 0.0001)
    """
    given_json = _without_json(args) if args.deepspeed is None else args.deepspeed
    source = source_of(given_json)
    raw, problems = as_json(given_json)
    problems += rename(raw)
    for entry in _entries(args, raw, world, steps, hidden_size):
        given = _get(raw, entry.path)
        if given == "auto" or (given is None and entry.names):
            _set(raw, entry.path, entry.value)
        elif given is not None and entry.names and not _same(entry, given):
            is_default = args.given.isdisjoint(entry.names)
            problems.append(
                f"{entry.path} = {as_text(given)}, but TrainingArguments say "
                f"{_described(args, entry)}"
                f'{" (the default)" * is_default}; write "auto" in the JSON, or set both to '
                "one value"
            )
    problems += _other_optimizer(args, _get(raw, "optimizer.type"))
    for section, monitor in _monitors(args).items():
        raw.setdefault(section, monitor)
    if problems:
        raise ConfigError(problems, source or "deepspeed")
    return raw


def stages_in(args: TrainingArguments) -> int | None:
    """Returns ``pipeline.stages`` of the JSON; None without it."""
    return None if args.deepspeed is None else stages_of(as_json(args.deepspeed)[0])


def _described(args: TrainingArguments, entry: Entry) -> str:
    """Formats the argument with its value, or the value with the arguments that determine it."""
    if len(entry.names) == 1 and getattr(args, entry.names[0]) == entry.value:
        return f"{entry.names[0]} = {as_text(entry.value)}"
    values = ", ".join(f"{name} = {as_text(getattr(args, name))}" for name in entry.names)
    return f"{as_text(entry.value)} ({values})"


def _entries(
    args: TrainingArguments, raw: dict[str, object], world: int, steps: int, hidden_size: int | None
) -> Iterator[Entry]:
    rows, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    yield Entry("train_micro_batch_size_per_gpu", rows, sizes[:1])
    yield Entry("gradient_accumulation_steps", accumulation, sizes[1:])
    yield Entry("train_batch_size", rows * accumulation * world, sizes)
    yield Entry("gradient_clipping", args.max_grad_norm, ("max_grad_norm",))
    for dtype in ("bf16", "fp16"):
        yield Entry(f"{dtype}.enabled", getattr(args, dtype), (dtype,))
    if hidden_size is not None:
        yield Entry(f"{ZERO}.reduce_bucket_size", hidden_size**2)
        yield Entry(f"{ZERO}.stage3_prefetch_bucket_size", int(0.9 * hidden_size**2))
        yield Entry(f"{ZERO}.stage3_param_persistence_threshold", 10 * hidden_size)
    rate, total = ("learning_rate",), ("max_steps" if args.max_steps > 0 else "num_train_epochs",)
    warmup = ("warmup_ratio" if args.warmup_ratio and not args.warmup_steps else "warmup_steps",)
    params = (
        Entry("optimizer.params.lr", args.learning_rate, rate),
        Entry("optimizer.params.betas", [args.adam_beta1, args.adam_beta2],
              ("adam_beta1", "adam_beta2")),
        Entry("optimizer.params.eps", args.adam_epsilon, ("adam_epsilon",)),
        Entry("optimizer.params.weight_decay", args.weight_decay, ("weight_decay",)),
        Entry("scheduler.params.warmup_min_lr", 0),
        Entry("scheduler.params.warmup_max_lr", args.learning_rate, rate),
        Entry("scheduler.params.total_num_steps", steps, total),
        # DeepSpeed's warm-up has at least two steps, so that 0 and 1 are equivalent.
        Entry("scheduler.params.warmup_num_steps", max(1, args.warmup(steps)), warmup),
    )  # fmt: skip
    for entry in params:
        section, _, name = entry.path.split(".")
        if name in _params_of(section, _get(raw, f"{section}.type")):
            yield entry


def _other_optimizer(args: TrainingArguments, kind: object) -> Iterator[str]:
    """Yields a problem for each argument that the optimizer of the JSON would replace."""
    if not isinstance(kind, str):
        return
    form = OPTIMIZERS[args.optim].form
    is_same = kind.lower() in (_ADAMW if form == "AdamW" else (str(form).lower(),))
    for name in args.changed(("optim_args",) if is_same else ("optim", "optim_args")):
        yield (
            f"optimizer.type = {as_text(kind)}, but TrainingArguments say {name} = "
            f"{as_text(getattr(args, name))}; remove {name}, or the JSON's `optimizer`"
        )


def _params_of(section: str, kind: object) -> set[str]:
    """Returns a type's parameters, ignoring case; empty if unknown, which the loader reports."""
    types = {name.lower(): params for name, params in NAMED_TYPES[section].items()}
    return set(types.get(kind.lower(), ())) if isinstance(kind, str) else set()


def _same(entry: Entry, given: object) -> bool:
    """Returns whether the JSON agrees with the arguments; the loader reports invalid values."""
    try:
        given = KEYS[entry.path].kind.check(given) if entry.path in KEYS else given
    except ConfigError:
        return True
    if entry.path == "scheduler.params.warmup_num_steps" and given in (0, 1):
        return entry.value == 1
    return bool((list(given) if isinstance(given, tuple) else given) == entry.value)


def _without_json(args: TrainingArguments) -> dict[str, object]:
    """Returns what a JSON would say of ``fsdp`` and of the dtype; fp16 scales as PyTorch's
    GradScaler does."""
    zero: dict[str, object] = {"stage": args.stage}
    if "offload" in args.fsdp:
        zero |= {key: {"device": "cpu"} for key in ("offload_optimizer", "offload_param")}
    raw: dict[str, object] = {ZERO: zero}
    if args.bf16:
        raw["bf16"] = {"check_grad_overflow": False}
    if args.fp16:
        raw["fp16"] = {
            "initial_scale_power": 16,
            "loss_scale_window": 2000,
            "hysteresis": 1,
            "raise_error_at_min_scale": False,
        }
    return raw


def _monitors(args: TrainingArguments) -> dict[str, object]:
    """Returns the config sections of the monitors in ``report_to``."""
    files = {
        "enabled": True,
        "output_path": args.logging_dir or os.path.join(args.output_dir, "runs"),
        "job_name": args.run_name or "trainer",
    }
    sections: dict[str, object] = {
        {"csv": "csv_monitor"}.get(name, name): files for name in args.report_to if name != "wandb"
    }
    if "wandb" in args.report_to:
        project = args.project or os.environ.get("WANDB_PROJECT")
        sections["wandb"] = {"enabled": True, **({"project": project} if project else {})}
    return sections


def _get(raw: Mapping[str, object], path: str) -> Any:
    """Returns the value at a dotted path, or None if a section is missing or is not an object."""
    value: object = raw
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _set(raw: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
    if isinstance(raw, dict):
        raw[name] = value
