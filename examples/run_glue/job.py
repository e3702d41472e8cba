"""A run as the command line describes it, and what follows from that: config, rows, optimizer."""

import dataclasses
import pathlib
from typing import Any

import optax
from jax.sharding import Mesh

import zerojax
from examples.auto import filled
from zerojax.models.deberta import SIZES

DEFAULTS: dict[str, Any] = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
LEARNING_RATE, ROWS = 2e-3, 4  # of the default model; the article has 2e-5 and 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `python -m examples.run_glue`."""

    config: pathlib.Path | None = None
    train_file: str | None = None
    validation_file: str | None = None
    text: tuple[pathlib.Path, ...] = ()
    columns: tuple[str, ...] = ("sentence1", "sentence2", "label")
    model: str = "deberta-mini"
    max_length: int = 128
    per_device_train_batch_size: int | None = None
    learning_rate: float | None = None
    num_train_epochs: int = 3
    out: pathlib.Path | None = None
    seed: int = 0
    devices: int | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        if len(self.columns) != 3:
            raise ValueError("--columns takes three names: two sentences and the label")
        if self.train_file and self.text:
            raise ValueError("--train-file and --text are two sources: keep one")
        if self.validation_file and not self.train_file:
            raise ValueError("--validation-file goes with --train-file, which is missing")
        if self.model not in SIZES and not self.folder:
            raise ValueError(
                f"--model {self.model} is neither one of {', '.join(SIZES)} nor a folder with a "
                "config.json"
            )
        if self.out and self.out.is_file():
            raise ValueError(f"--out {self.out} is a file: name a folder")

    @property
    def folder(self) -> pathlib.Path | None:
        """Where the model's weights are; None for a size."""
        folder = pathlib.Path(self.model)
        return folder if (folder / "config.json").is_file() else None

    def zero(self, mesh: Mesh, steps: int) -> zerojax.Zero:
        """The decorator of a run of so many updates, which stand where the config has "auto"."""
        zero = zerojax.zero(self.config or DEFAULTS, mesh=mesh, auto=self._auto(steps))
        if zero.config.optimizer is None and zero.config.scheduler is not None:
            raise ValueError(f"{self.config} names a scheduler and no optimizer: add one")
        return zero

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
                f"--per-device-train-batch-size {given}, but {self.config} says {sizes.micro}: "
                "leave one of them out"
            )
        return (given or sizes.micro or ROWS) * sizes.accumulation * world
