"""What the decorator costs: a decorated step against plain ``jax.jit`` of the same step.

    python -m benchmarks.step_time                   # under two minutes on two cores
    python -m benchmarks.step_time --json records/step_time.json

Both run in one process, on one device, at stage 0, with the state donated, turn by turn, so that
a slow spell of the machine meets both; medians are compared. To expect: a ratio of at most 1.03,
and less than 300 microseconds a call of Python for a state of 300 leaves.
"""

import argparse
import dataclasses
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
from benchmarks.measure import create_state_of, train_step_of
from benchmarks.report import console, write_json
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


def table(timings: list[Timing]) -> Table:
    """One row for each comparison."""
    shown = Table(title=f"one {jax.devices()[0].device_kind}, stage 0, medians")
    shown.add_column("step")
    for name in ("calls", "plain jit ms", "decorated ms", "decorated / plain",
                 "plain call µs", "decorated call µs", "added µs a call"):  # fmt: skip
        shown.add_column(name, justify="right")
    for each in timings:
        shown.add_row(
            each.what,
            str(each.calls),
            f"{each.plain * 1e3:.3f}",
            f"{each.decorated * 1e3:.3f}",
            f"{each.ratio:.3f}",
            f"{each.plain_dispatch * 1e6:.0f}",
            f"{each.decorated_dispatch * 1e6:.0f}",
            f"{each.overhead * 1e6:.0f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time", description="The decorator's cost per step."
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures here")
    options = parser.parse_args()
    timings = [gpt(), many_leaves()]
    console().print(table(timings))
    if options.json:
        device = jax.devices()[0].device_kind
        write_json(
            options.json,
            {"device": device, "timings": [dataclasses.asdict(each) for each in timings]},
        )


if __name__ == "__main__":
    main()
