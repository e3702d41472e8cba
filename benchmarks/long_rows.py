"""What tiling of loss and MLP saves on long rows, on the GPU compile.

    python -m benchmarks.long_rows                              # three compiles, minutes
    python -m benchmarks.long_rows --record benchmarks/records

Llama 3 8B on eight H100s, one row of 131,072 tokens each. Needs ``pip install
'zerojax[compile,examples]'`` and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks.published_steps import fused_llama
from benchmarks.published_tables import GIGA, Setup, open_study
from benchmarks.report import console, console_table, markdown_table, write_dated
from zerojax.foresight.attribution import ACTIVATIONS, LOGITS
from zerojax.foresight.choice import Choice
from zerojax.models import llama

SEQ, DEVICES = 131072, 8
PIECES: tuple[tuple[int | None, int | None], ...] = ((None, None), (32, None), (32, 16))
ABOUT = (
    "Bytes of one of 8 H100s at stage 3, bf16, AdamW, layers in a scan and rematerialised from "
    "their inputs; cuDNN's attention assumed. Compiled by XLA:GPU for absent devices."
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step's bytes of one device; ``sent`` by kind of collective.

    Attributes:
      loss, mlp: Pieces.
      logits: At the peak.
      seconds: Forecast.
    """

    loss: int
    mlp: int
    fits: bool
    peak: int
    activations: int
    logits: int
    sent: dict[str, int]
    seconds: float


def compiled(loss: int | None, mlp: int | None) -> Step:
    """The step with so many pieces of the loss and of the MLP."""
    sizes = llama.SIZES["llama3-8b"] | {"loss_chunks": loss, "mlp_chunks": mlp}
    setup = Setup(
        function=fused_llama(sizes, keep="nothing"),
        devices=f"h100:{DEVICES}",
        seq=SEQ,
        precision="bf16",
        remat=True,
    )
    forecast = open_study(setup).forecast(Choice(stage=3, micro=1, remat=True))
    memory = forecast.peak.memory
    return Step(
        loss or 1,
        mlp or 1,
        forecast.fits,
        forecast.peak.bytes,
        memory.get(ACTIVATIONS, 0),
        memory.get(LOGITS, 0),
        {each.kind: each.bytes for each in forecast.traffic},
        forecast.seconds,
    )


def rows(steps: Sequence[Step]) -> list[list[str]]:
    """Headings, and a line for each step."""
    lines = [
        ["pieces of loss, MLP", "peak GB", "activations GB", "logits GB", "gathered, scattered GB",
         "forecast s"],
    ]  # fmt: skip
    for s in steps:
        sent = ", ".join(f"{s.sent[kind] / GIGA:.1f}" for kind in ("all-gather", "reduce-scatter"))
        peak = f"{s.peak / GIGA:.1f}{'' if s.fits else ', does not fit'}"
        parts = (f"{each / GIGA:.1f}" for each in (s.activations, s.logits))
        lines.append([f"{s.loss}, {s.mlp}", peak, *parts, sent, f"{s.seconds:.1f}"])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_rows")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    # Compiling for an absent GPU works only while JAX does not look for one.
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    steps = [compiled(*pieces) for pieces in PIECES]
    title = f"Llama 3 8B, a row of {SEQ:,} tokens a GPU"
    console().print(console_table(rows(steps), title=title, caption=ABOUT))
    if options.record:
        figures = {"steps": [dataclasses.asdict(step) for step in steps]}
        write_dated(options.record, "long_rows", title, figures, ABOUT, markdown_table(rows(steps)))


if __name__ == "__main__":
    main()
