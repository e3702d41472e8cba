"""Memory of a GPT's training step with the fused kernels, by XLA's GPU compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

import zerojax
from benchmarks.measure import create_state_of, train_step_of
from pallas_kernels import compat
from zerojax.models.gpt import GPT, SIZES, GPTConfig
from zerojax.models.kernels import Kernels

DEVICES, STAGE = 8, 3
ABOUT = (
    "Bytes of one of 8 H100s at stage 3 in bf16, blocks scanned and rematerialised, AdamW; the\n"
    "norms and loss by Mosaic kernels. Attention is the model's own in all of them:\n"
    "cuDNN, which the fused layers take on a GPU, cannot be compiled without a GPU, and\n"
    "at 1024 positions the scores of its backward pass are the peak."
)


@dataclasses.dataclass(frozen=True)
class Size:
    """A model of ``zerojax.models.gpt``, and what each device trains it on."""

    model: str
    block_size: int
    rows: int


SIZES_MEASURED = (Size("mini", 128, 2), Size("small", 1024, 8), Size("small", 256, 32))
WAYS = ("flax's layers", "fused layers", "fused layers and loss")


@dataclasses.dataclass(frozen=True)
class Step:
    """Bytes of one device for one step; ``launches`` are the Mosaic kernels in its program."""

    size: Size
    way: str
    temporaries: int
    peak: int
    launches: int


def compiled(size: Size, way: str, implementation: str) -> Step:
    """The step on 8 H100s at stage 3 in bf16, blocks scanned and rematerialised."""
    mesh = zerojax.topology("h100", devices=DEVICES)
    zero = zerojax.zero(stage=STAGE, bf16=True, mesh=mesh)
    sizes = SIZES[size.model] | {"block_size": size.block_size}
    kernels = None if way == WAYS[0] else Kernels(zero.per_device, implementation)
    model = GPT(GPTConfig(**sizes, scan=True, remat=True), kernels)

    step = zero(train_step_of(model, fused_loss=way == WAYS[2]))
    state = zero.abstract_state(create_state_of(model), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((DEVICES * size.rows, size.block_size + 1), jnp.int32)
    program = step.lower(state, {"tokens": tokens}).compile()
    analysis: Any = program.memory_analysis()
    return Step(
        size,
        way,
        analysis.temp_size_in_bytes,
        analysis.peak_memory_in_bytes,
        compat.kernels_in(program),
    )


def run() -> list[Step]:
    """All sizes, each way."""
    cases = [(size, way) for size in SIZES_MEASURED for way in WAYS]
    return [
        compiled(*case, "mosaic_gpu")
        for case in track(cases, description="the main job's step", transient=True)
    ]


def rows(steps: Sequence[Step]) -> list[list[str]]:
    """Headings, and a line for each step."""
    lines = [["model", "tokens a device", "step", "temporaries MB", "peak MB", "launches"]]
    for s in steps:
        tokens = f"{s.size.rows} x {s.size.block_size}"
        sizes = f"{s.temporaries / 1e6:.0f}", f"{s.peak / 1e6:.0f}"
        lines.append([s.size.model, tokens, s.way, *sizes, str(s.launches)])
    return lines
