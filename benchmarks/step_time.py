"""Time of a decorated step against plain ``jax.jit`` of the same step.

    python -m benchmarks.step_time                   # some three minutes on two cores
    python -m benchmarks.step_time --record benchmarks/records

All run in one process, with the state donated, turn by turn, so that a slow spell of the machine
meets all; medians are compared. On one device at stage 0, to expect: a ratio of at most 1.03, and
less than 300 microseconds a call of Python for a state of 300 leaves. On several (8 virtual ones
on a CPU) every stage beside plain data parallelism and plain FSDP, to expect: at most 1.03 times
plain data parallelism.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zerojax
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.measure import create_state_of, train_step_of
from benchmarks.plain import fsdp_sharding, plain_jit
from zerojax.models.gpt import GPT, GPTConfig

DEVICES = 8
STAGES = (0, 1, 2, 3)
DATA_PARALLEL, FSDP = "plain data parallel", "plain FSDP"
AGAIN = "plain data parallel, again"
"""A second copy of the base, which shows the distance of equal programs on this machine."""
LIMIT = 1.03
LEAVES = 300
WARM_UP = 5

Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """Times of one way to run a step, for each call.

    Attributes:
      seconds: Seconds from the call to the finished result.
      dispatch: Seconds until the call returns, when the work is still under way.
      processor: Processor seconds of all threads of the process, which other work on the machine
        disturbs less than the clock.
    """

    seconds: list[float]
    dispatch: list[float]
    processor: list[float]


def take_turns(ways: Mapping[str, tuple[Step, Any]], batch: Any, calls: int) -> dict[str, Way]:
    """Runs steps with their states turn by turn; every way follows every other equally often."""
    names = [*ways]
    states = {name: state for name, (_, state) in ways.items()}
    found = {name: Way(seconds=[], dispatch=[], processor=[]) for name in names}
    for turn in range(WARM_UP + calls):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order if turn // len(names) % 2 == 0 else order[::-1]:
            began, busy = time.perf_counter(), time.process_time()
            states[name], result = ways[name][0](states[name], batch)
            returned = time.perf_counter()
            jax.block_until_ready((states[name], result))
            if turn >= WARM_UP:
                found[name].dispatch.append(returned - began)
                found[name].seconds.append(time.perf_counter() - began)
                found[name].processor.append(time.process_time() - busy)
    return found


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over the turns, in which neighbouring calls are compared."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """A step on one device, plain and decorated, turn by turn."""

    what: str
    plain: Way
    decorated: Way

    @property
    def ratio(self) -> float:
        return ratio(self.decorated.seconds, self.plain.seconds)

    @property
    def overhead(self) -> float:
        """Seconds of Python that the decorator adds to a call.

        Read it off a step with nothing to compute: on the CPU a busy step takes Python's core.
        """
        plain, decorated = map(statistics.median, (self.plain.dispatch, self.decorated.dispatch))
        return decorated - plain


def compare(
    what: str,
    create_state: Callable[[jax.Array], TrainState],
    step: Step,
    batch: Any,
    *,
    calls: int,
) -> Timing:
    """Runs a step plain and decorated from equal states on one device."""
    say(f"timing {what}")
    zero, key = zerojax.zero(stage=0, mesh=zerojax.mesh(1)), jax.random.key(0)
    ways: dict[str, tuple[Step, Any]] = {
        "plain": (jax.jit(step, donate_argnums=0), jax.jit(create_state)(key)),
        "decorated": (zero(step), zero.init(create_state, key)),
    }
    return Timing(what=what, **take_turns(ways, jax.device_put(batch), calls))


def gpt(calls: int | None = None) -> Timing:
    """A GPT of a few layers on the CPU, GPT-2 small on an accelerator."""
    small = jax.default_backend() == "cpu"
    config = GPTConfig(
        vocab_size=256 if small else 50304,
        block_size=128 if small else 1024,
        n_layer=4 if small else 12,
        n_head=4 if small else 12,
        n_embd=128 if small else 768,
        remat=not small,
    )
    model = GPT(config)
    return compare(
        f"GPT, {config.n_layer} layers, width {config.n_embd}",
        create_state_of(model),
        train_step_of(model),
        {"tokens": _tokens(8, config)},
        calls=calls or (60 if small else 100),
    )


def many_leaves(calls: int = 300, leaves: int = LEAVES) -> Timing:
    """A state of ``leaves`` tiny arrays under Adam: nothing to compute, so Python shows."""

    def create_state(key: jax.Array) -> TrainState:
        params = {f"p{i:03}": jnp.full((4,), float(i)) for i in range(leaves // 3)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    def step(state: TrainState, batch: jax.Array) -> tuple[TrainState, Any]:
        def loss(params: Any) -> jax.Array:
            return sum((leaf.sum() for leaf in jax.tree.leaves(params)), start=batch.sum())

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return compare(f"state of {leaves} leaves", create_state, step, np.ones(4, "f4"), calls=calls)


def stages(calls: int = 40, *, layers: int = 4, width: int = 256, rows: int = 32) -> dict[str, Way]:
    """A GPT in float32 on all devices under each way."""
    mesh = zerojax.mesh()
    config = GPTConfig(vocab_size=256, block_size=128, n_layer=layers, n_head=4, n_embd=width)
    over_devices = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put({"tokens": _tokens(rows, config)}, over_devices)
    return take_turns(_ways(GPT(config), mesh), batch, calls)


def _ways(model: GPT, mesh: Mesh) -> dict[str, tuple[Step, Any]]:
    """Step and state of each way, by name."""
    create_state, key = create_state_of(model), jax.random.key(0)

    def replicated(mesh: Mesh, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec())

    def plain(shard: Callable[[Mesh, Any], NamedSharding]) -> tuple[Step, Any]:
        abstract = jax.eval_shape(create_state, key)
        step = plain_jit(train_step_of(model), mesh, abstract, shard=shard)
        shardings = jax.tree.map(functools.partial(shard, mesh), abstract)
        return step, jax.jit(create_state, out_shardings=shardings)(key)

    def decorated(stage: int) -> tuple[Step, TrainState]:
        zero = zerojax.zero(stage=stage, mesh=mesh)
        return zero(train_step_of(model)), zero.init(create_state, key)

    return {
        DATA_PARALLEL: plain(replicated),
        AGAIN: plain(replicated),
        FSDP: plain(fsdp_sharding),
        **{f"stage {stage}": decorated(stage) for stage in STAGES},
    }


def _tokens(rows: int, config: GPTConfig) -> np.ndarray:
    shape = (rows, config.block_size + 1)
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)


HEADER = ("step", "calls", "plain jit ms", "decorated ms", "decorated / plain", "plain call µs",
          "decorated call µs", "added µs a call")  # fmt: skip


def timing_rows(timings: Sequence[Timing]) -> list[list[str]]:
    """Headings, and a row for each comparison."""
    rows = [[*HEADER]]
    for each in timings:
        ways = each.plain, each.decorated
        seconds = (f"{statistics.median(way.seconds) * 1e3:.3f}" for way in ways)
        calls = (f"{statistics.median(way.dispatch) * 1e6:.0f}" for way in ways)
        count = str(len(each.plain.seconds))
        added = f"{each.overhead * 1e6:.0f}"
        rows.append([each.what, count, *seconds, f"{each.ratio:.3f}", *calls, added])
    return rows


def stage_rows(found: Mapping[str, Way]) -> list[list[str]]:
    """Headings, and a row for each way."""
    lines = [["way", "ms", "over plain data parallel", "processor ms", "over its", "call µs"]]
    base = found[DATA_PARALLEL]
    for name, way in found.items():
        clock, busy, call = map(statistics.median, (way.seconds, way.processor, way.dispatch))
        over, busy_over = ratio(way.seconds, base.seconds), ratio(way.processor, base.processor)
        times = f"{clock * 1e3:.1f}", f"{over:.3f}", f"{busy * 1e3:.1f}", f"{busy_over:.3f}"
        lines.append([name, *times, f"{call * 1e6:.0f}"])
    return lines


def missed(found: Mapping[str, Way]) -> list[str]:
    """The stages above ``LIMIT`` times plain data parallelism."""
    base = found[DATA_PARALLEL].seconds
    ratios = {name: ratio(way.seconds, base) for name, way in found.items()}
    return [
        f"{name}: {over:.3f} of {DATA_PARALLEL}, more than {LIMIT}"
        for name, over in ratios.items()
        if name.startswith("stage") and over > LIMIT
    ]


@question(
    "step_time",
    "The decorator's cost per step",
    argument("--calls", type=int, default=40, help="of each stage"),
)
def main(options: argparse.Namespace) -> Answer:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    before = os.getloadavg()[0]
    timings = [gpt(), many_leaves()]
    device = jax.devices()[0].device_kind
    parts: list[str | Table] = [
        "All in one run, turn by turn; medians, and the ratio is the median of the ratios of\n"
        "neighbouring calls.",
        Table(timing_rows(timings), title=f"One {device}, stage 0"),
    ]
    several: dict[str, Way] = {}
    if jax.device_count() > 1:
        several = stages(options.calls)
        parts.append(Table(stage_rows(several), title=f"A GPT on {jax.device_count()} devices"))
        parts.append(f"Limits missed: {'; '.join(missed(several)) or 'none'}.")
    load = before, os.getloadavg()[0]
    figures = {"device": device, "load": load, "timings": timings, "stages": several}
    return Answer(figures, parts, machine=f", {device}, load {load[0]:.1f} to {load[1]:.1f}")


if __name__ == "__main__":
    main()
