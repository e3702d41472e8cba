"""The options of a run, and what they say for each "auto" of its config.

auto_of(options, updates=300)    # {"optimizer.params.lr": 0.001, "scheduler.params...": ...}
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import hjson
import yaml
from jax.sharding import Mesh

import zerojax

DEFAULT_CONFIG = pathlib.Path(__file__).parent / "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `python -m examples.run_seq2seq`."""

    config: pathlib.Path
    train_file: str | None
    validation_file: str | None
    source_column: str
    target_column: str
    text: pathlib.Path | None
    words: int
    source_prefix: str
    model: str
    max_source_length: int
    max_target_length: int
    val_min_target_length: int
    num_beams: int
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    learning_rate: float | None
    weight_decay: float | None
    num_warmup_steps: int | None
    num_train_epochs: int
    max_steps: int | None
    out: pathlib.Path
    seed: int
    devices: int | None


def check_lengths(options: Options, positions: int) -> None:
    """Whether the model has positions for the longest rows."""
    for name in ("max_source_length", "max_target_length"):
        if (length := getattr(options, name)) > positions:
            raise ValueError(
                f"--{name.replace('_', '-')} {length}, but --model {options.model} has "
                f"{positions} positions (max_position_embeddings): take that many or fewer"
            )
    if options.val_min_target_length > options.max_target_length:
        raise ValueError(
            f"--val-min-target-length {options.val_min_target_length} is more than "
            f"--max-target-length {options.max_target_length}"
        )


def configured(options: Options, mesh: Mesh, rows: int) -> tuple[zerojax.Zero, int, int]:
    """The config on a mesh, the number of updates, and the rows that each of them takes."""

    def sizes(updates: int) -> tuple[zerojax.Zero, int, int]:
        zero = zerojax.zero(options.config, mesh=mesh, auto=auto_of(options, updates))
        batch = zero.config.batch(mesh.size)
        taken = options.per_device_train_batch_size * mesh.size * batch.accumulation
        if batch.train not in (None, taken):
            raise ValueError(
                f"--per-device-train-batch-size {options.per_device_train_batch_size} makes "
                f"{taken} rows an update, but {options.config} says {batch.train}: make them equal"
            )
        return zero, (rows // taken) * options.num_train_epochs, taken

    _, updates, taken = sizes(1)
    if not updates:
        raise ValueError(
            f"{rows} rows to train on are fewer than the {taken} of an update: give more, or a "
            f"--per-device-train-batch-size below {options.per_device_train_batch_size}"
        )
    updates = min(updates, options.max_steps or updates)
    return sizes(updates)[0], updates, taken


def auto_of(options: Options, updates: int) -> dict[str, Any]:
    """A value for each "auto" of the config that an option decides.

    Raises:
      ValueError: An option was given, and the config has a value of its own.
    """
    decided: dict[str, tuple[str, float | None]] = {
        "optimizer.params.lr": ("learning_rate", 3e-3),
        "optimizer.params.weight_decay": ("weight_decay", 0.0),
        "scheduler.params.warmup_max_lr": ("learning_rate", 3e-3),
        "scheduler.params.warmup_num_steps": ("num_warmup_steps", 50),
        "scheduler.params.total_num_steps": ("", updates),
    }
    config = dict(_flat(_settings(options.config)))
    auto = {}
    for key, (name, default) in decided.items():
        given, there = getattr(options, name, None), config.get(key)
        if there == "auto":
            auto[key] = default if given is None else given
        elif given not in (None, there) and key != "scheduler.params.warmup_max_lr":
            raise ValueError(
                f"--{name.replace('_', '-')} {given}, but {options.config} has {key} = {there}: "
                'leave the option out, or write "auto" there'
            )
    return auto


def _settings(config: pathlib.Path) -> Any:
    """What the file says, and the DeepSpeed JSON behind a YAML; {} where it cannot be read, of
    which `zerojax.zero` says more."""
    try:
        if config.suffix not in (".yaml", ".yml"):
            return hjson.loads(config.read_text())
        section = (yaml.safe_load(config.read_text()) or {}).get("deepspeed_config") or {}
        file = section.get("deepspeed_config_file")
        return _settings(config.parent / file) if file else {}
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return {}


def _flat(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(section, Mapping):
        for key, value in section.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, section
