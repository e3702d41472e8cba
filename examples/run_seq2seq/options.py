"""The options of a run, and what they say for each "auto" of its config.

Example::

    zero, updates, rows = configured(options, mesh, len(pairs.train))
    tx = optimizer_of(options, zero, updates)
"""

import dataclasses
import pathlib
from typing import Any

import optax
from jax.sharding import Mesh

import zerojax
from examples.auto import filled
from examples.tracking import ReportTo, monitors

# The options that stand for an "auto".
GIVEN = {
    "learning_rate": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "num_warmup_steps": "scheduler.params.warmup_num_steps",
}
DEFAULT_CONFIG = pathlib.Path(__file__).parent / "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Those of `python -m examples.run_seq2seq`."""

    config: pathlib.Path
    dataset_name: str | None
    dataset_config_name: str | None
    train_file: str | None
    validation_file: str | None
    n_train: int | None
    n_val: int | None
    source_column: str
    target_column: str
    text: pathlib.Path | None
    words: int
    source_prefix: str
    model_name_or_path: str
    max_source_length: int
    max_target_length: int
    val_max_target_length: int | None
    val_min_target_length: int
    pad_to_max_length: bool
    num_beams: int
    per_device_train_batch_size: int
    per_device_eval_batch_size: int
    learning_rate: float | None
    weight_decay: float | None
    num_warmup_steps: int | None
    num_train_epochs: int
    max_train_steps: int | None
    output_dir: pathlib.Path
    with_tracking: bool
    report_to: ReportTo | None
    seed: int
    devices: int | None

    def __post_init__(self) -> None:
        files = self.train_file, self.validation_file
        if [self.text is not None, any(files), self.dataset_name is not None].count(True) > 1 or (
            any(files) and not all(files)
        ):
            raise ValueError(
                "give --train_file and --validation_file, or --dataset_name, or --text alone"
            )
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError("--dataset_config_name needs --dataset_name")

    @property
    def written_length(self) -> int:
        """Tokens that an evaluation writes at most."""
        return self.val_max_target_length or self.max_target_length


def check_lengths(options: Options, positions: int) -> None:
    """Whether the model has positions for the longest rows."""
    for name in ("max_source_length", "max_target_length", "val_max_target_length"):
        if (length := getattr(options, name) or 0) > positions:
            raise ValueError(
                f"--{name} {length}, but --model_name_or_path {options.model_name_or_path} has "
                f"{positions} positions (max_position_embeddings): lower it"
            )
    if options.val_min_target_length > options.written_length:
        longest = "val_max" if options.val_max_target_length else "max"
        raise ValueError(
            f"--val_min_target_length {options.val_min_target_length} is more than "
            f"--{longest}_target_length {options.written_length}"
        )


def configured(options: Options, mesh: Mesh, rows: int) -> tuple[zerojax.Zero, int, int]:
    """The config on a mesh, the number of updates, and the rows that each of them takes."""

    def sizes(updates: int) -> tuple[zerojax.Zero, int, int]:
        zero = zerojax.zero(options.config, mesh=mesh, auto=auto_of(options, updates))
        if tracked := monitors(options.with_tracking, options.report_to, options.output_dir):
            zero = zerojax.zero(dataclasses.replace(zero.config, **tracked), mesh=mesh)
        batch = zero.config.batch(mesh.size)
        taken = options.per_device_train_batch_size * mesh.size * batch.accumulation
        if batch.train not in (None, taken):
            raise ValueError(
                f"--per_device_train_batch_size {options.per_device_train_batch_size} makes "
                f"{taken} rows an update, but {options.config} says {batch.train}: make them equal"
            )
        return zero, (rows // taken) * options.num_train_epochs, taken

    _, updates, taken = sizes(1)
    if not updates:
        raise ValueError(
            f"{rows} rows to train on are fewer than the {taken} of an update: give more, or a "
            f"--per_device_train_batch_size below {options.per_device_train_batch_size}"
        )
    updates = min(updates, options.max_train_steps or updates)
    return sizes(updates)[0], updates, taken


def auto_of(options: Options, updates: int) -> dict[str, Any]:
    """A value for each "auto" of the config that an option decides.

    Raises:
      ValueError: An option was given, and the config has a value of its own.
    """
    rate, decay, warmup = _values(options, updates)
    values = {
        "optimizer.params.lr": rate,
        "optimizer.params.weight_decay": decay,
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": warmup,
        "scheduler.params.total_num_steps": updates,
    }
    given = {key: (name, getattr(options, name)) for name, key in GIVEN.items()}
    return filled(options.config, values, given)


def optimizer_of(options: Options, zero: zerojax.Zero, updates: int) -> Any:
    """The config's optimizer; where it names none, AdamW, warmed up and decayed linearly."""
    if zero.config.optimizer:
        return zero.optimizer()
    rate, decay, warmup = _values(options, updates)
    ramps = optax.linear_schedule(0, rate, warmup), optax.linear_schedule(rate, 0, updates - warmup)
    return optax.adamw(optax.join_schedules(ramps, [warmup]), weight_decay=decay)


def _values(options: Options, updates: int) -> tuple[float, float, int]:
    """Learning rate, weight decay and updates of the warm-up: as given, or the defaults."""
    rate, decay, warmup = (getattr(options, name) for name in GIVEN)
    return (
        3e-3 if rate is None else rate,
        0.0 if decay is None else decay,
        max(1, min(50, updates // 10)) if warmup is None else warmup,
    )
