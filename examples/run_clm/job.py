"""A training run as the command line describes it, and what follows from that.

Example::

    job = Job(model="mini", steps=300, block_size=128, ...)
    job.model_config.n_layer                          # 4
    job.rows(zerojax.zero(job.config).config, world=8)  # 16
"""

import dataclasses
import hashlib
import math
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import zerojax
from examples.auto import filled
from examples.run_clm import data
from zerojax.models.gpt import SIZES, GPTConfig
from zerojax.models.kernels import Kernels
from zerojax.models.tokenizer import gpt2_tokenizer, load_tokenizer

DEFAULT_CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "zero3.json"
DEFAULT_ROWS = 16
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
    """The options of `python -m examples.run_clm`. No text: the Python library's own sources."""

    text: list[pathlib.Path]
    config: pathlib.Path
    steps: int
    model: str
    batch_size: int | None
    block_size: int
    scan: bool
    remat: bool
    dropout: float
    kernels: Fused | None
    out: pathlib.Path
    seed: int
    devices: int | None
    eval_every: int
    save_every: int
    restart: bool
    from_step: int | None
    tokenizer: pathlib.Path | None = None
    learning_rate: float | None = None
    mesh: str | None = None
    verbose: bool = False

    @property
    def auto(self) -> dict[str, Any]:
        """A value for each "auto" of the config that the options decide."""
        rate = LEARNING_RATE if self.learning_rate is None else self.learning_rate
        values = {
            "optimizer.params.lr": rate,
            "scheduler.params.warmup_max_lr": rate,
            "scheduler.params.warmup_num_steps": max(1, min(20, self.steps // 10)),
            "scheduler.params.total_num_steps": self.steps,
        }
        given = {"optimizer.params.lr": ("learning_rate", self.learning_rate)}
        return filled(self.config, values, given)

    @property
    def model_config(self) -> GPTConfig:
        """The model; its window is the block that it trains on."""
        size = size_of(self.model) | {"block_size": self.block_size}
        return GPTConfig(**size, scan=self.scan, remat=self.remat, dropout=self.dropout)

    def fused(self, per_device: Callable[..., Any]) -> Kernels | None:
        """The fused layers of `--kernels`, for `GPT`."""
        if self.kernels is None:
            return None
        return Kernels(per_device, None if self.kernels == "auto" else self.kernels)

    def read_text(self) -> data.Text:
        """The user's files, or the standard library, split."""
        documents = [data.read_text(path) for path in self.text] or data.python_sources()
        return data.split(documents, self.block_size, self.read_tokenizer())

    def read_tokenizer(self) -> Any:
        """The folder's `tokenizer.json`, or GPT-2's merges; None for bytes."""
        if self.tokenizer is None:
            return None
        merges = self.tokenizer.suffix in (".bpe", ".txt")
        read = gpt2_tokenizer if merges else load_tokenizer
        return read(self.tokenizer, self.model_config.vocab_size)

    def rows(self, config: zerojax.ZeroConfig, world: int) -> int:
        """Rows per update: `--batch-size`, else what the JSON says, else about 16."""
        sizes = config.batch(world)
        if self.batch_size is not None and sizes.train not in (None, self.batch_size):
            raise ValueError(
                f"--batch-size {self.batch_size}, but {self.config} says {sizes.train} rows on "
                f"{world} devices: leave one of them out"
            )
        unit = world * sizes.accumulation
        rows = self.batch_size or sizes.train or unit * math.ceil(DEFAULT_ROWS / unit)
        if rows % unit:
            raise ValueError(
                f"--batch-size {rows} does not divide among {world} devices x "
                f"{sizes.accumulation} micro-batches: use a multiple of {unit}"
            )
        return rows

    def identity(self, config: zerojax.ZeroConfig, rows: int, text: data.Text) -> dict[str, Any]:
        """What a continued run must share, as JSON. Stage, offload, devices, micro-batches,
        remat and kernels may change."""
        model = dataclasses.asdict(self.model_config)
        del model["remat"], model["dtype"]
        free = {*BATCH, *OFFLOAD, *MEMORY, *LOGS, "notes"}
        settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        digest = hashlib.sha256(text.train.tobytes()).hexdigest()[:12]
        return {
            **{f"model.{name}": value for name, value in model.items()},
            **{name: repr(value) for name, value in settings.items() if name not in free},
            "rows per update": rows,
            "seed": self.seed,
            # With the tokenizer, as it is the text's tokens that are summed.
            "text": f"{len(text.train)} {text.unit}, sha256 {digest}",
        }


def size_of(model: str) -> dict[str, Any]:
    """The entry of `SIZES`, or an error that lists them."""
    if model not in SIZES:
        raise ValueError(f"--model {model} is not known; there are {', '.join(SIZES)}")
    return SIZES[model]
