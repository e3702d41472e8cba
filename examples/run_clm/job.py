"""A training run as the command line describes it, and what follows from that.

Example::

    job = Job(config_name="mini", max_train_steps=300, block_size=128, ...)
    job.model_config.n_layer                          # 4
    job.rows(zerojax.zero(job.config).config, world=8)  # 16
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import zerojax
from examples.auto import filled
from examples.run_clm import data
from examples.tables import dataset
from examples.tracking import ReportTo
from zerojax.models.gpt import SIZES, GPTConfig
from zerojax.models.kernels import Kernels
from zerojax.models.tokenizer import gpt2_tokenizer, load_tokenizer

DEFAULT_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "zero3.json"
DEFAULT_ROWS = 16
DEFAULT_STEPS = 300
LEARNING_RATE = 1e-3  # where the config has "auto"
Fused = Literal["auto", "mosaic_gpu", "xla"]

# Keys and fields of a config by what they decide.
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOAD = ("offload_optimizer", "offload_param")
MEMORY = (
    "stage", "stage3_param_persistence_threshold", "sub_group_size", "cpu_checkpointing",
)  # fmt: skip
LOGS = ("steps_per_print", "wall_clock_breakdown", "csv_monitor", "tensorboard", "wandb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of `python -m examples.run_clm`. No text and no dataset: the Python library's own
    sources."""

    text: list[pathlib.Path]
    config: pathlib.Path
    config_name: str
    block_size: int
    scan: bool
    remat: bool
    dropout: float
    kernels: Fused | None
    output_dir: pathlib.Path
    seed: int
    devices: int | None
    restart: bool
    from_step: int | None
    max_train_steps: int | None = None
    num_train_epochs: int | None = None
    per_device_train_batch_size: int | None = None
    per_device_eval_batch_size: int | None = None
    eval_every: int | None = None
    save_every: int | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    tokenizer_name: pathlib.Path | None = None
    learning_rate: float | None = None
    mesh: str | None = None
    with_tracking: bool = False
    report_to: ReportTo | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        if self.dataset_name and self.text:
            raise ValueError("--dataset_name and --text are both given: remove one")
        if self.dataset_config_name and not self.dataset_name:
            raise ValueError("--dataset_config_name needs --dataset_name")

    def steps(self, text: data.Text, rows: int) -> int:
        """Updates in all: of so many epochs, or `--max_train_steps`, whichever ends first."""
        if self.num_train_epochs is None:
            return self.max_train_steps or DEFAULT_STEPS
        per_epoch = data.Batches(text.train, rows, self.block_size).per_epoch
        if not per_epoch:
            raise ValueError(
                f"{len(text.train)} {text.unit} to train on are fewer blocks of {self.block_size} "
                f"than the {rows} of an update: give more, or a smaller "
                "--per_device_train_batch_size"
            )
        steps = self.num_train_epochs * per_epoch
        return min(steps, self.max_train_steps or steps)

    def auto(self, steps: int) -> dict[str, Any]:
        """A value for each "auto" of the config that the options decide, in a run of `steps`."""
        rate = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        values = {
            "optimizer.params.lr": rate,
            "scheduler.params.warmup_max_lr": rate,
            "scheduler.params.warmup_num_steps": max(1, min(20, steps // 10)),
            "scheduler.params.total_num_steps": steps,
        }
        given = {"optimizer.params.lr": ("learning_rate", self.learning_rate)}
        return filled(self.config, values, given)

    @property
    def model_config(self) -> GPTConfig:
        """The model; its window is the block that it trains on."""
        size = size_of(self.config_name) | {"block_size": self.block_size}
        return GPTConfig(**size, scan=self.scan, remat=self.remat, dropout=self.dropout)

    def fused(self, per_device: Callable[..., Any]) -> Kernels | None:
        """The fused layers of `--kernels`, for `GPT`."""
        if self.kernels is None:
            return None
        return Kernels(per_device, None if self.kernels == "auto" else self.kernels)

    def read_text(self) -> data.Text:
        """The user's files or dataset, or the standard library, split."""
        tokenizer = self.read_tokenizer()
        if self.dataset_name:
            source = dataset(self.dataset_name, self.dataset_config_name)
            train, held_out = (data.documents(source, split) for split in ("train", "validation"))
            return data.split(train, self.block_size, tokenizer, held_out)
        documents = [data.read_text(path) for path in self.text] or data.python_sources()
        return data.split(documents, self.block_size, tokenizer)

    def read_tokenizer(self) -> Any:
        """The folder's `tokenizer.json`, or GPT-2's merges; None for bytes."""
        if self.tokenizer_name is None:
            return None
        merges = self.tokenizer_name.suffix in (".bpe", ".txt")
        read = gpt2_tokenizer if merges else load_tokenizer
        return read(self.tokenizer_name, self.model_config.vocab_size)

    def rows(self, config: zerojax.ZeroConfig, world: int) -> int:
        """Rows of an update, by `--per_device_train_batch_size`, else by the JSON, else 16."""
        sizes, given = config.batch(world), self.per_device_train_batch_size
        unit = world * sizes.accumulation
        if given is not None and sizes.train not in (None, given * unit):
            raise ValueError(
                f"--per_device_train_batch_size {given} makes {given * unit} rows an update on "
                f"{world} devices, but {self.config} says {sizes.train}: leave one of them out"
            )
        return given * unit if given else sizes.train or unit * math.ceil(DEFAULT_ROWS / unit)

    def identity(self, config: zerojax.ZeroConfig, rows: int, text: data.Text) -> dict[str, Any]:
        """What a continued run must share, as JSON. Stage, offload, devices, micro-batches,
        remat and kernels may change."""
        model = dataclasses.asdict(self.model_config)
        del model["remat"], model["dtype"]
        free = {*BATCH, *OFFLOAD, *MEMORY, *LOGS, "notes"}
        settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return {
            **{f"model.{name}": value for name, value in model.items()},
            **{name: repr(value) for name, value in settings.items() if name not in free},
            "rows per update": rows,
            "seed": self.seed,
            # With the tokenizer, as it is the text's tokens that are summed.
            "text": text.fingerprint
            + ", each block once an epoch" * (self.num_train_epochs is not None),
        }


def size_of(model: str) -> dict[str, Any]:
    """The entry of `SIZES`, or an error that lists them."""
    if model not in SIZES:
        raise ValueError(f"--config_name {model} is not known; there are {', '.join(SIZES)}")
    return SIZES[model]
