"""What tiling of loss and MLP saves on long rows, and how long a row may be, on the GPU compile.

    python -m benchmarks.long_rows                              # ten compiles, minutes
    python -m benchmarks.long_rows --record benchmarks/records

Llama 3 8B on eight H100s, one row of 131,072 tokens each. Then the longest row of one H100, and of
eight that share the row's tokens (a mesh axis "seq"), with the optimizer's state and what blocks
keep in host memory. Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks.published_steps import fused_llama
from benchmarks.published_tables import GIGA, Setup, open_study
from benchmarks.report import console, console_table, markdown_table, write_dated
from zerojax.foresight.attribution import ACTIVATIONS, LOGITS
from zerojax.foresight.choice import Choice, Offload
from zerojax.models import llama

SEQ, DEVICES = 131072, 8
PIECES: tuple[tuple[int | None, int | None], ...] = ((None, None), (32, None), (32, 16))
ABOUT = (
    "Bytes of one of 8 H100s at stage 3, bf16, AdamW, layers in a scan and rematerialised from "
    "their inputs; cuDNN's attention assumed. Compiled by XLA:GPU for absent devices."
)


OPTIMIZER: Offload = "optimizer"
BOTH: Offload = "optimizer and parameters"


class Row(NamedTuple):
    """One row that all devices of a step share.

    Attributes:
      devices, tokens: H100s, and what they share.
      offload: To the host, beside what blocks keep.
      goal: What the case is for.
    """

    devices: int
    tokens: int
    offload: Offload
    goal: str


# Steps are of 65,536 tokens a GPU.
ROWS = (
    Row(1, 524288, OPTIMIZER, "500 thousand"),
    Row(1, 524288, BOTH, "the same, parameters on the host as well"),
    Row(1, 983040, BOTH, "longest"),
    Row(1, 1048576, BOTH, "one step longer"),
    Row(8, 3735552, OPTIMIZER, "3.7 million, as ALST reports"),
    Row(8, 5767168, OPTIMIZER, "longest"),
    Row(8, 6291456, OPTIMIZER, "one step longer"),
)
ABOUT_ROWS = (
    "One row of a step, stage 3, bf16, AdamW. Eight GPUs share the row's tokens (data=1, seq=8), "
    "and ZeRO shards over both axes together. In host memory: the optimizer's state and the inputs "
    "of all 32 blocks. Loss in 128 pieces, MLP in 64; cuDNN's attention assumed, of 32 heads of "
    "all tokens, or 4 a GPU. Compiled by XLA:GPU for absent devices. Theory of Ulysses' "
    "all-to-alls: q, k, v and the result of a GPU's tokens, in the forward pass, its repetition "
    "and the backward pass, 7/8 of each sent. XLA repeats: instructions with which XLA's own pass "
    "computes a value again to save memory."
)


@dataclasses.dataclass(frozen=True)
class RowStep:
    """The forecast of one :class:`Row`: bytes of one device, and seconds.

    Attributes:
      memory: At the peak, by kind.
      peak, host: In all; host memory for each device.
      again: Instructions with which XLA computes a value again to save memory.
      sent: By kind of collective.
      exchanged: What theory has the all-to-alls send.
    """

    row: Row
    fits: bool
    peak: int
    memory: dict[str, int]
    host: int
    again: int
    sent: dict[str, int]
    exchanged: float
    seconds: float
    mfu: float


def shared(row: Row) -> RowStep:
    """The step with that row."""
    sizes = llama.SIZES["llama3-8b"]
    setup = Setup(
        function=fused_llama(sizes | {"loss_chunks": 128, "mlp_chunks": 64}, keep="nothing"),
        devices=f"h100:{row.devices}",
        seq=row.tokens,
        precision="bf16",
        remat=True,
        shared=row.devices,
        zero={"cpu_checkpointing": True},
    )
    choice = Choice(stage=3, micro=1, remat=True, offload=row.offload)
    forecast = open_study(setup).forecast(choice)
    # q and the result have all heads, k and v one for each group.
    heads = 2 * sizes["n_head"] + 2 * max(sizes["n_kv_head"], row.devices)
    width, each = sizes["n_embd"] // sizes["n_head"], row.tokens / row.devices
    bytes_a_pass = 2 * each * heads * width * sizes["n_layer"]
    return RowStep(
        row,
        forecast.fits,
        forecast.peak.bytes,
        dict(forecast.peak.memory),
        forecast.host_bytes,
        forecast.peak.again,
        {each.kind: each.bytes for each in forecast.traffic},
        3 * bytes_a_pass * (row.devices - 1) / row.devices,
        forecast.seconds,
        forecast.mfu,
    )


def shared_rows(steps: Sequence[RowStep]) -> list[list[str]]:
    """Headings, and a line for each step."""
    lines = [
        ["H100s, tokens, offloaded", "peak GB", "activations GB", "XLA repeats", "host GB a GPU",
         "gathered, scattered GB", "all-to-alls GB (theory)", "forecast s", "MFU"],
    ]  # fmt: skip
    for s in steps:
        peak = f"{s.peak / GIGA:.1f}{'' if s.fits else ', does not fit'}"
        sent = (s.sent.get(kind, 0) / GIGA for kind in ("all-gather", "reduce-scatter"))
        exchanged = f"{s.sent.get('all-to-all', 0) / GIGA:.1f} ({s.exchanged / GIGA:.1f})"
        lines.append(
            [
                f"{s.row.devices}, {s.row.tokens:,}, {s.row.offload}: {s.row.goal}",
                peak,
                f"{s.memory.get(ACTIVATIONS, 0) / GIGA:.1f}",
                str(s.again),
                f"{s.host / GIGA:.0f}",
                ", ".join(f"{each:.1f}" for each in sent),
                exchanged,
                f"{s.seconds:,.0f}",
                f"{s.mfu:.0%}",
            ]
        )
    return lines


def kinds(steps: Sequence[RowStep]) -> list[list[str]]:
    """What takes the memory at each peak, GB."""
    names = sorted({name for s in steps for name in s.memory})
    lines = [["H100s, tokens, offloaded", *names]]
    for s in steps:
        case = f"{s.row.devices}, {s.row.tokens:,}, {s.row.offload}"
        lines.append([case, *(f"{s.memory.get(name, 0) / GIGA:.1f}" for name in names)])
    return lines


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
    longest = [shared(row) for row in ROWS]
    title = f"Llama 3 8B, a row of {SEQ:,} tokens a GPU"
    console().print(console_table(rows(steps), title=title, caption=ABOUT))
    title_rows = "Llama 3 8B, one row of all GPUs"
    console().print(console_table(shared_rows(longest), title=title_rows, caption=ABOUT_ROWS))
    console().print(console_table(kinds(longest)))
    if options.record:
        figures = {
            "steps": [dataclasses.asdict(step) for step in steps],
            "rows": [dataclasses.asdict(step) | {"row": step.row._asdict()} for step in longest],
        }
        parts = [
            markdown_table(rows(steps), texts=1),
            f"# {title_rows}",
            ABOUT_ROWS,
            markdown_table(shared_rows(longest), texts=1),
            "What takes the memory at the peak, GB:",
            markdown_table(kinds(longest), texts=1),
        ]
        write_dated(options.record, "long_rows", title, figures, ABOUT, *parts)


if __name__ == "__main__":
    main()
