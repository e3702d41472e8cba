"""What the decorator costs: a decorated step against plain ``jax.jit`` of the same step.

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
import datetime
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from rich.progress import track
from rich.table import Table

import zerojax
from benchmarks import step_time_stages
from benchmarks.measure import create_state_of, train_step_of
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.models.gpt import GPT, GPTConfig

LEAVES = 300
WARM_UP = 5

Step = Callable[[TrainState, Any], tuple[TrainState, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Medians over the calls of one comparison, in seconds.

    Attributes:
      plain, decorated: from the call to the finished result.
      plain_dispatch, decorated_dispatch: until the call returns, the work being under way.
      ratio: median of decorated / plain over neighbouring calls.
    """

    what: str
    calls: int
    plain: float
    decorated: float
    plain_dispatch: float
    decorated_dispatch: float
    ratio: float

    @property
    def overhead(self) -> float:
        """Seconds of Python that the decorator adds to a call.

        Read it off a step with nothing to compute: on the CPU a busy step takes Python's core.
        """
        return self.decorated_dispatch - self.plain_dispatch


def compare(
    what: str,
    create_state: Callable[[jax.Array], TrainState],
    step: Step,
    batch: Any,
    *,
    calls: int,
) -> Timing:
    """Run both steps turn by turn from equal states and return the medians."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    zero = zerojax.zero(stage=0, mesh=mesh)
    key = jax.random.key(0)
    steps: tuple[Step, Step] = (jax.jit(step, donate_argnums=0), zero(step))
    states = [jax.jit(create_state)(key), zero.init(create_state, key)]
    batches = [jax.device_put(batch), jax.device_put(batch)]
    dispatches: tuple[list[float], list[float]] = ([], [])
    totals: tuple[list[float], list[float]] = ([], [])
    for turn in track(range(WARM_UP + calls), what, transient=True):
        # Who goes first alternates, as the second finds warmer caches.
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            states[which], result = steps[which](states[which], batches[which])
            returned = time.perf_counter()
            jax.block_until_ready((states[which], result))
            if turn >= WARM_UP:
                dispatches[which].append(returned - began)
                totals[which].append(time.perf_counter() - began)
    return Timing(
        what=what,
        calls=calls,
        plain=statistics.median(totals[0]),
        decorated=statistics.median(totals[1]),
        plain_dispatch=statistics.median(dispatches[0]),
        decorated_dispatch=statistics.median(dispatches[1]),
        ratio=statistics.median(b / a for a, b in zip(*totals, strict=True)),
    )


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
    shape = (8, config.block_size + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, shape, dtype=np.int32)
    return compare(
        f"GPT, {config.n_layer} layers, width {config.n_embd}",
        create_state_of(model),
        train_step_of(model),
        {"tokens": tokens},
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


HEADER = ("step", "calls", "plain jit ms", "decorated ms", "decorated / plain", "plain call µs",
          "decorated call µs", "added µs a call")  # fmt: skip


def rows(timings: list[Timing]) -> list[list[str]]:
    """Headings, and a row for each comparison."""
    return [[*HEADER]] + [
        [
            each.what,
            str(each.calls),
            f"{each.plain * 1e3:.3f}",
            f"{each.decorated * 1e3:.3f}",
            f"{each.ratio:.3f}",
            f"{each.plain_dispatch * 1e6:.0f}",
            f"{each.decorated_dispatch * 1e6:.0f}",
            f"{each.overhead * 1e6:.0f}",
        ]
        for each in timings
    ]


def table(timings: list[Timing]) -> Table:
    """The same for a console."""
    title = f"one {jax.devices()[0].device_kind}, stage 0, medians"
    return console_table(rows(timings), title=title)


def markdown(
    timings: list[Timing], several: step_time_stages.Stages | None, load: tuple[float, float]
) -> str:
    """The record; ``load`` is the machine's, of a minute, before and after."""
    device = jax.devices()[0].device_kind
    parts = [
        heading(
            "The decorator's cost per step", f", {device}, load {load[0]:.1f} to {load[1]:.1f}"
        ),
        "All in one run, turn by turn; medians, and the ratio is the median of the ratios of\n"
        "neighbouring calls. On one device, at stage 0:",
        markdown_table(rows(timings)),
    ]
    if several:
        parts += [f"{several.what}, on {several.devices} devices:"]
        parts += [markdown_table(step_time_stages.rows(several))]
        parts += [f"Limits missed: {'; '.join(several.missed()) or 'none'}."]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description="The decorator's cost per step."
    )
    parser.add_argument("--calls", type=int, default=40, help="of each stage")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures here")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", step_time_stages.DEVICES)
    before = os.getloadavg()[0]
    timings = [gpt(), many_leaves()]
    console().print(table(timings))
    several = None
    if jax.device_count() > 1:
        several = step_time_stages.stages(options.calls)
        title = f"{several.what}, on {several.devices} devices"
        console().print(console_table(step_time_stages.rows(several), title=title))
    load = before, os.getloadavg()[0]
    figures = {
        "device": jax.devices()[0].device_kind,
        "load": load,
        "timings": [dataclasses.asdict(each) for each in timings],
        "stages": several and dataclasses.asdict(several),
    }
    if options.json:
        write_json(options.json, figures)
    if options.record:
        stem = options.record / f"{datetime.date.today()}-step_time"
        write_json(stem.with_suffix(".json"), figures)
        stem.with_suffix(".md").write_text(markdown(timings, several, load))


if __name__ == "__main__":
    main()
