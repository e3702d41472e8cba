"""A run as the command line describes it, and what follows from that: config, rows, optimizer."""

import dataclasses
import pathlib
from typing import Any

import optax
from jax.sharding import Mesh

import zerojax
from examples.auto import filled
from examples.tables import dataset
from examples.tracking import ReportTo, monitors
from zerojax.models.deberta import SIZES

DEFAULTS: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
LEARNING_RATE, ROWS = 2e-3, 4  # of the default model; the article has 2e-5 and 40
OUTPUT = pathlib.Path("runs/glue")
"""The folder of the figures of a run that saves no model."""
TASKS = {
    "mrpc": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "wnli": ("sentence1", "sentence2"),
}
"""GLUE's tasks that classify pairs, with the columns of their sentences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `python -m examples.run_glue`."""

    config: pathlib.Path | None = None
    task_name: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_file: str | None = None
    validation_file: str | None = None
    text: tuple[pathlib.Path, ...] = ()
    columns: tuple[str, ...] | None = None
    model_name_or_path: str = "deberta-mini"
    ignore_mismatched_sizes: bool = False
    max_length: int = 128
    pad_to_max_length: bool = False
    per_device_train_batch_size: int | None = None
    per_device_eval_batch_size: int | None = None
    learning_rate: float | None = None
    num_train_epochs: int = 3
    output_dir: pathlib.Path | None = None
    with_tracking: bool = False
    report_to: ReportTo | None = None
    seed: int = 0
    devices: int | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        if self.columns is not None and len(self.columns) != 3:
            raise ValueError("--columns takes three names: two sentences and the label")
        if self.task_name is not None and self.task_name not in TASKS:
            raise ValueError(f"--task_name {self.task_name} is none of {', '.join(TASKS)}")
        sources = {
            "--train_file": self.train_file,
            "--dataset_name or --task_name": self.dataset_name or self.task_name,
            "--text": self.text,
        }
        if len(given := [name for name, value in sources.items() if value]) > 1:
            raise ValueError(f"{' and '.join(given)} are both given: remove one")
        for name, other in (
            ("validation_file", "train_file"),
            ("dataset_config_name", "dataset_name"),
        ):
            if getattr(self, name) and not getattr(self, other):
                raise ValueError(f"--{name} needs --{other}")
        if self.model_name_or_path not in SIZES and not self.folder:
            raise ValueError(
                f"--model_name_or_path {self.model_name_or_path} is neither one of "
                f"{', '.join(SIZES)} nor a folder with a config.json"
            )
        if self.output_dir and self.output_dir.is_file():
            raise ValueError(f"--output_dir {self.output_dir} is a file: name a folder")

    @property
    def folder(self) -> pathlib.Path | None:
        """Where the model's weights are; None for a size."""
        folder = pathlib.Path(self.model_name_or_path)
        return folder if (folder / "config.json").is_file() else None

    @property
    def dataset(self) -> str | None:
        """A folder, or a name for `datasets`; None for files and text."""
        if self.task_name and not self.dataset_name:
            return dataset("glue", self.task_name)
        return dataset(self.dataset_name, self.dataset_config_name) if self.dataset_name else None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the two sentences and of the label."""
        return self.columns or (*TASKS[self.task_name or "mrpc"], "label")

    def zero(self, mesh: Mesh, steps: int) -> zerojax.Zero:
        """The decorator of a run of so many updates, which stand where the config has "auto"."""
        zero = zerojax.zero(self.config or DEFAULTS, mesh=mesh, auto=self._auto(steps))
        if zero.config.optimizer is None and zero.config.scheduler is not None:
            raise ValueError(f"{self.config} names a scheduler and no optimizer: add one")
        tracked = monitors(self.with_tracking, self.report_to, self.output_dir or OUTPUT)
        if not tracked:
            return zero
        return zerojax.zero(dataclasses.replace(zero.config, **tracked), mesh=mesh)

    def _auto(self, steps: int) -> dict[str, Any]:
        """A value for each "auto" that the options decide."""
        if self.config is None:
            return {}
        rate = self.learning_rate or LEARNING_RATE
        values = {
            "optimizer.params.lr": rate,
            "optimizer.params.weight_decay": 0.0,
            "scheduler.params.warmup_max_lr": rate,
            "scheduler.params.warmup_num_steps": max(1, self.warmup(steps)),
            "scheduler.params.total_num_steps": steps,
        }
        given = {"optimizer.params.lr": ("learning_rate", self.learning_rate)}
        return filled(self.config, values, given)

    def warmup(self, steps: int) -> int:
        """Updates in which the rate rises: a tenth for random weights, which else may stay at
        chance."""
        return 0 if self.folder else steps // 10

    def optimizer(self, zero: zerojax.Zero, steps: int) -> optax.GradientTransformation:
        """The config's, or AdamW without decay whose rate falls linearly to 0, as the article's.

        Random weights have it rise first.
        """
        if zero.config.optimizer is not None:
            return zero.optimizer()
        highest, warm = self.learning_rate or LEARNING_RATE, self.warmup(steps)
        rise = optax.linear_schedule(0.0, highest, warm)
        fall = optax.linear_schedule(highest, 0.0, steps - warm)
        return optax.adamw(optax.join_schedules([rise, fall], [warm]), weight_decay=0.0)

    def rows(self, config: zerojax.ZeroConfig, world: int) -> int:
        """Rows of an update over all devices."""
        sizes, given = config.batch(world), self.per_device_train_batch_size
        if sizes.micro is not None and given not in (None, sizes.micro):
            raise ValueError(
                f"--per_device_train_batch_size {given}, but {self.config} says {sizes.micro}: "
                "leave one of them out"
            )
        return (given or sizes.micro or ROWS) * sizes.accumulation * world
