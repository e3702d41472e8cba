"""How much of the time of collectives a step hides, with and without ``overlap_comm``; no GPU.

    python -m benchmarks.hidden --only llama-7b --devices h100:64
    python -m benchmarks.hidden --record benchmarks/records       # everything, half an hour

Stage 3, bf16, AdamW, rematerialised blocks. Seconds are those of the forecast's timeline
(zerojax.hlo.timeline) over the compiled schedule. Unrolled models are compiled with a few layers.
Needs ``pip install -e '.[compile,examples]'``.
"""

import argparse
import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import linen as nn

from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.config import ZeroConfig, load
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.forecast import Forecast
from zerojax.hlo.timeline import INWARD, OUTWARD
from zerojax.models import gpt, llama
from zerojax.tuning.study import Study

MODELS = {"llama-7b": 2048, "gpt2-xl": 1024}  # tokens in a row
MICROS = (1, 4)
DEVICES = ("h100:8", "h100:64", "a100:8", "a100:64")
WAYS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"zero_optimization": {"stage": 2}},
    "4 micro-batches": {"gradient_accumulation_steps": 4},
    "groups of 8": {"zero_optimization": {"mics_shard_size": 8}},
}
"""What is different in the configuration; all but the first for scanned models on 64 GPUs."""
UNROLLED_LAYERS = 8
HEADINGS = [
    "model", "GPUs", "rows a GPU", "overlap_comm", "step ms", "arithmetic ms", "collectives ms",
    "hidden", "exposed ms", "gathered GB", "peak GB",
]  # fmt: skip
NOTE = (
    "Stage 3 and one micro-batch unless said otherwise, bf16, AdamW, rematerialised blocks; rows "
    "of 2048 tokens for Llama 7B, 1024 for GPT-2 XL. Arithmetic is the step without what it waits "
    "for; hidden is the share of the collectives' time that nothing waits for. Milliseconds are "
    "the forecast's, over the schedule that XLA:GPU compiles; unrolled models have "
    f"{UNROLLED_LAYERS} layers. overlap_comm: off leaves the schedule to XLA and gathers layers "
    "where they are used."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What to compile.

    Attributes:
      model: a name in ``MODELS``.
      scan: its blocks are stacked; else there are ``UNROLLED_LAYERS`` of them.
      devices: as the command line takes them.
      micro: rows a device.
      overlap: ``overlap_comm`` of the config.
      way: a name in ``WAYS``.
    """

    model: str
    scan: bool
    devices: str
    micro: int
    overlap: bool
    way: str = next(iter(WAYS))

    @property
    def name(self) -> str:
        way = "" if self.way == next(iter(WAYS)) else f", {self.way}"
        return f"{self.model}, {'scanned' if self.scan else 'unrolled'}{way}"

    @property
    def config(self) -> ZeroConfig:
        way = dict(WAYS[self.way])
        zero = {"stage": 3, "overlap_comm": self.overlap} | way.pop("zero_optimization", {})
        return load(
            {
                "train_micro_batch_size_per_gpu": self.micro,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": zero,
            }
            | way
        )

    def function(self) -> nn.Module:
        """The model."""
        if self.model == "gpt2-xl":
            sizes: dict[str, Any] = dict(gpt.SIZES["gpt2-xl"])
            sizes |= {} if self.scan else {"n_layer": UNROLLED_LAYERS}
            return gpt.GPT(gpt.GPTConfig(**sizes, scan=self.scan, remat=True))
        sizes = llama.SIZES[self.model] | ({} if self.scan else {"n_layer": UNROLLED_LAYERS})
        return llama.Llama(llama.LlamaConfig(**sizes, scan=self.scan, remat=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """The collectives of a step. Seconds and bytes of a device.

    Attributes:
      step: the whole step.
      collectives: for which they are under way.
      exposed: for which the step waits for them.
      gathered: bytes sent in all-gathers.
      peak: device memory.
    """

    step: float
    collectives: float
    exposed: float
    gathered: int
    peak: int

    @property
    def hidden(self) -> float:
        return 1 - self.exposed / self.collectives if self.collectives else 1.0


def overlap_of(forecast: Forecast) -> Overlap:
    """What a forecast says of the collectives."""
    sent = [each for each in forecast.traffic if each.kind not in (INWARD, OUTWARD)]
    return Overlap(
        step=forecast.seconds,
        collectives=sum(each.seconds for each in sent),
        exposed=sum(each.waited for each in sent),
        gathered=sum(each.bytes for each in sent if each.kind == "all-gather"),
        peak=forecast.peak.bytes,
    )


def compile_case(case: Case) -> Overlap:
    """Compile a case and follow its schedule.

    Raises:
      ImportError: the GPU compiler's wheels are not installed.
    """
    mesh, rates = parse_devices(case.devices)
    seq = MODELS[case.model]
    study = Study(case.function, case.config, mesh, rates, rows=None, seq=seq)
    return overlap_of(study.forecast(study.given))


def cases(
    models: Sequence[str], devices: Sequence[str], scans: Sequence[bool] = (True, False)
) -> list[Case]:
    """All cases, each without and with overlap."""
    product = itertools.product(models, scans, devices, WAYS, MICROS, (False, True))
    return [
        Case(model=model, scan=scan, devices=kind, micro=micro, overlap=overlap, way=way)
        for model, scan, kind, way, micro, overlap in product
        if way == next(iter(WAYS)) or (scan and kind.endswith(":64"))
    ]


def run(chosen: Sequence[Case], say: Callable[[str], None]) -> dict[Case, Overlap]:
    """Compile the chosen cases; ``say`` is told of each."""
    results = {}
    for case in chosen:
        results[case] = found = compile_case(case)
        say(
            f"{case.name}, {case.devices}, micro-batch {case.micro}, overlap {case.overlap}: "
            f"{found.hidden:.1%} hidden, {1e3 * found.exposed:.1f} ms exposed"
        )
    return results


def table(results: dict[Case, Overlap]) -> list[list[str]]:
    """A row of headings, and one for each case."""
    return [
        HEADINGS,
        *(
            [
                case.name,
                case.devices,
                str(case.micro),
                "on" if case.overlap else "off",
                *(
                    f"{1e3 * seconds:.1f}"
                    for seconds in (each.step, each.step - each.exposed, each.collectives)
                ),
                f"{each.hidden:.0%}",
                f"{1e3 * each.exposed:.1f}",
                f"{each.gathered / 1e9:.2f}",
                f"{each.peak / 1e9:.2f}",
            ]
            for case, each in results.items()
        ),
    ]


def markdown(results: dict[Case, Overlap]) -> str:
    """The record."""
    title = heading("Collectives beside computation", ", no GPU")
    return "\n\n".join([title, NOTE, markdown_table(table(results), texts=4)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hidden", description="How much of the collectives is hidden."
    )
    parser.add_argument("--only", action="append", choices=[*MODELS], help="may be repeated")
    parser.add_argument("--devices", action="append", metavar="KIND:N", help="may be repeated")
    parser.add_argument("--scanned", action="store_true", help="no unrolled models")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # compiling for an absent GPU works only so
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    out = console()
    scans = (True,) if options.scanned else (True, False)
    chosen = cases(options.only or [*MODELS], options.devices or DEVICES, scans)
    results = run(chosen, lambda text: out.print(text, highlight=False))
    out.print(console_table(table(results), caption=NOTE, caption_justify="left"))
    if options.record:
        stem = options.record / f"{datetime.date.today()}-hidden"
        figures = [
            {**dataclasses.asdict(case), **dataclasses.asdict(each)}
            for case, each in results.items()
        ]
        write_json(stem.with_suffix(".json"), {"cases": figures})
        stem.with_suffix(".md").write_text(markdown(results))


if __name__ == "__main__":
    main()
