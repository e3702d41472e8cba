"""What a parameter costs for being one of many: a step with tiny leaves at each stage.

    python -m benchmarks.leaves                # 400 parameters of 8 elements, 8 virtual CPU devices
    python -m benchmarks.leaves --leaves 2000

The stages run turn by turn in one process, and medians are compared, so that a slow spell of the
machine meets all. To expect: stages 1 to 3 take at most 1.5 times the time of stage 0.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from rich.table import Table

import zerojax
from benchmarks.report import console, write_json
from zerojax.hlo.traffic import collectives

ROWS, WIDTH = 16, 8
WARM_UP = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a stage costs.

    Attributes:
      counts: collectives of the compiled step by kind.
      seconds: from the call to the finished result, the median.
      ratio: to stage 0, the median over neighbouring calls.
    """

    stage: int
    counts: dict[str, int]
    seconds: float
    ratio: float


def creating(leaves: int) -> Callable[[jax.Array], TrainState]:
    def create(key: jax.Array) -> TrainState:
        params = {f"p{i:04}": jnp.full((WIDTH,), 1 + i / 1e4) for i in range(leaves)}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    return create


def step(state: TrainState, x: Any) -> tuple[TrainState, Any]:
    def loss(params: Any) -> jax.Array:
        return sum((jnp.mean((x @ p - 1) ** 2) for p in params.values()), start=jnp.zeros(()))

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value}


def at(stage: int, mesh: Mesh | None = None) -> zerojax.Zero:
    """Stage 3 with every parameter cut, however small."""
    return zerojax.zero(stage=stage, stage3_param_persistence_threshold=0, mesh=mesh)


def compiled(zero: zerojax.Zero, leaves: int) -> str:
    """The text of the compiled step."""
    state = zero.abstract_state(creating(leaves), jax.random.key(0))
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    return zero(step).lower(state, batch).compile().as_text() or ""


def counts(text: str) -> dict[str, int]:
    return dict(Counter(each.kind for each in collectives(text)))


def compare(leaves: int, calls: int) -> list[Cost]:
    """Each stage on the devices at hand."""
    zeros = [at(stage) for stage in range(4)]
    steps = [zero(step) for zero in zeros]
    states = [zero.init(creating(leaves), jax.random.key(0)) for zero in zeros]
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("f4")
    times: list[list[float]] = [[] for _ in zeros]
    for turn in range(WARM_UP + calls):
        for stage, run in enumerate(steps):
            began = time.perf_counter()
            states[stage], out = run(states[stage], x)
            jax.block_until_ready((states[stage], out))
            if turn >= WARM_UP:
                times[stage].append(time.perf_counter() - began)
    return [
        Cost(
            stage=stage,
            counts=counts(compiled(zero, leaves)),
            seconds=statistics.median(times[stage]),
            ratio=statistics.median(b / a for a, b in zip(times[0], times[stage], strict=True)),
        )
        for stage, zero in enumerate(zeros)
    ]


def table(costs: list[Cost], leaves: int) -> Table:
    shown = Table(title=f"{leaves} parameters of {WIDTH} elements, {jax.device_count()} devices")
    for name in ("stage", "all-gather", "reduce-scatter", "all-reduce", "ms", "to stage 0"):
        shown.add_column(name, justify="right")
    for each in costs:
        kinds = (each.counts.get(k, 0) for k in ("all-gather", "reduce-scatter", "all-reduce"))
        shown.add_row(
            str(each.stage), *map(str, kinds), f"{each.seconds * 1e3:.1f}", f"{each.ratio:.2f}"
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.leaves", description="The cost of many small parameters."
    )
    parser.add_argument("--leaves", type=int, default=400)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures here")
    options = parser.parse_args()
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_num_cpu_devices", 8)
    costs = compare(options.leaves, options.calls)
    console().print(table(costs, options.leaves))
    if options.json:
        write_json(options.json, {"costs": [dataclasses.asdict(each) for each in costs]})


if __name__ == "__main__":
    main()
