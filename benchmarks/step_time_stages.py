"""Stages 0 to 3 on several devices, beside plain ``jax.jit`` with replicated and with cut state."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import track

import zerojax
from benchmarks.measure import create_state_of, fsdp_sharding, train_step_of
from zerojax.models.gpt import GPT, GPTConfig

DEVICES = 8
STAGES = (0, 1, 2, 3)
DATA_PARALLEL, FSDP = "plain data parallel", "plain FSDP"
AGAIN = "plain data parallel, again"
"""A second copy of the base: how far equal programs part on this machine."""
LIMIT = 1.03
WARM_UP = 4

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run the step.

    Attributes:
      seconds: of each call, from the call to the finished result.
      dispatch: of each call, until it returns.
      processor: seconds of all threads of the process, of each call; beside other work on the
        machine these tell more than the clock.
      ratio, processor_ratio: medians of its time, and of its processor's time, over plain data
        parallelism's in the same turn.
    """

    name: str
    seconds: list[float]
    dispatch: list[float]
    processor: list[float]
    ratio: float
    processor_ratio: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """All ways, turn by turn in one run."""

    what: str
    devices: int
    ways: list[Way]

    def missed(self) -> list[str]:
        """The stages above ``LIMIT`` times plain data parallelism."""
        return [
            f"{way.name}: {way.ratio:.3f} of {DATA_PARALLEL}, more than {LIMIT}"
            for way in self.ways
            if way.name.startswith("stage") and way.ratio > LIMIT
        ]


def stages(
    calls: int = 40,
    *,
    layers: int = 4,
    width: int = 256,
    rows: int = 32,
    tokens: int = 128,
    only: Sequence[str] = (),
) -> Stages:
    """A GPT in float32 on all devices under each way; ``only`` names those beside the base."""
    mesh = zerojax.mesh()
    config = GPTConfig(vocab_size=256, block_size=tokens, n_layer=layers, n_head=4, n_embd=width)
    model = GPT(config)
    shape = (rows, tokens + 1)
    batch = {"tokens": np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)}
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    makers = ways(model, mesh)
    names = [name for name in makers if not only or name in (DATA_PARALLEL, *only)]
    made = {name: makers[name]() for name in names}
    steps = {name: step for name, (step, _) in made.items()}
    states = {name: state for name, (_, state) in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    dispatch: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for turn in track(range(WARM_UP + calls), "stages", transient=True):
        # Every way follows every other equally often.
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order if turn // len(names) % 2 == 0 else order[::-1]:
            began, busy = time.perf_counter(), time.process_time()
            states[name], result = steps[name](states[name], batch)
            returned = time.perf_counter()
            jax.block_until_ready((states[name], result))
            if turn >= WARM_UP:
                dispatch[name].append(returned - began)
                seconds[name].append(time.perf_counter() - began)
                processor[name].append(time.process_time() - busy)
    return Stages(
        what=f"GPT, {layers} layers, width {width}, {rows} x {tokens} tokens",
        devices=mesh.size,
        ways=[
            Way(
                name=name,
                seconds=seconds[name],
                dispatch=dispatch[name],
                processor=processor[name],
                ratio=_ratio(seconds[name], seconds[DATA_PARALLEL]),
                processor_ratio=_ratio(processor[name], processor[DATA_PARALLEL]),
            )
            for name in names
        ],
    )


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def ways(model: GPT, mesh: Mesh) -> dict[str, Callable[[], tuple[Step, Any]]]:
    """By name what makes the step and its state."""

    def plain(shard: Callable[[Any], NamedSharding]) -> tuple[Step, Any]:
        create_state, key = create_state_of(model), jax.random.key(0)
        shardings = jax.tree.map(shard, jax.eval_shape(create_state, key))
        rows = NamedSharding(mesh, PartitionSpec("data"))
        step = jax.jit(
            train_step_of(model),
            in_shardings=(shardings, rows),
            out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
            donate_argnums=0,
        )
        return step, jax.jit(create_state, out_shardings=shardings)(key)

    def replicated() -> tuple[Step, Any]:
        return plain(lambda leaf: NamedSharding(mesh, PartitionSpec()))

    def decorated(stage: int) -> tuple[Step, TrainState]:
        zero = zerojax.zero(stage=stage, mesh=mesh)
        return zero(train_step_of(model)), zero.init(create_state_of(model), jax.random.key(0))

    return {
        DATA_PARALLEL: replicated,
        AGAIN: replicated,
        FSDP: lambda: plain(functools.partial(fsdp_sharding, mesh)),
        **{f"stage {stage}": functools.partial(decorated, stage) for stage in STAGES},
    }


def rows(found: Stages) -> list[list[str]]:
    """Headings, and a line for each way."""
    lines = [["way", "ms", "over plain data parallel", "processor ms", "over its", "call µs"]]
    for way in found.ways:
        processor, dispatch = (statistics.median(x) for x in (way.processor, way.dispatch))
        clock = f"{way.median * 1e3:.1f}", f"{way.ratio:.3f}"
        busy = f"{processor * 1e3:.1f}", f"{way.processor_ratio:.3f}"
        lines.append([way.name, *clock, *busy, f"{dispatch * 1e6:.0f}"])
    return lines
