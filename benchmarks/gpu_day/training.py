"""Part 3: the training steps of models under zerojax, and the same steps in plain jit."""

import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
import optax.contrib

import zerojax
from benchmarks import precision, step_time
from benchmarks.checkpoint_times import take_turns
from benchmarks.gpu_day import models
from benchmarks.gpu_day.measurement import attempts
from benchmarks.measure import LEARNING_RATE, create_state_of, train_step_of
from benchmarks.prediction import bytes_of, compiled_bytes

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(LEARNING_RATE),
    "muon": lambda: optax.contrib.muon(LEARNING_RATE),
}
JSON: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}


def beside(
    size: Mapping[str, Any],
    rows: int,
    seq: int,
    ways: Mapping[str, Mapping[str, Any]],
    turns: int = 2,
    steps: int = 5,
) -> Iterator[dict[str, Any]]:
    """The training step of a model in bf16 with AdamW, by several ways in turn: A B A B.

    Args:
      size: The model, as ``models.build`` takes it.
      ways: By name the keyword arguments of :func:`way`.
      turns: How often each way has its turn, with a new state each time.
      steps: Timed steps of a turn.
    """
    batch = models.batch_of(size, rows, seq)
    prepared: dict[str, tuple[Callable[[], Any], Any]] = {}
    taken: dict[str, list[models.Steps]] = {name: [] for name in ways}

    def turn(name: str) -> dict[str, Any]:
        if name not in prepared:
            prepared[name] = way(size, **ways[name])
        create, step = prepared[name]
        state, times = models.run_steps(step, create(), batch, steps)
        taken[name].append(times)
        return models.figures(size, rows, seq, taken[name], program_bytes(step, state, batch))

    for _ in range(turns):
        yield from attempts({name: functools.partial(turn, name) for name in ways})


def way(
    size: Mapping[str, Any],
    stage: int | None = None,
    layers: str = models.FUSED,
    scan: bool = True,
    offload: Mapping[str, Any] | None = None,
    optimizer: str = "adamw",
) -> tuple[Callable[[], Any], Any]:
    """A function that returns a new state, and the step.

    ``stage``: that of zerojax; None for ``jax.jit``, the parameters cast to bf16 and the state
    donated. ``offload`` joins "zero_optimization". ``optimizer``: a key of ``OPTIMIZERS``.
    """
    key, tx = jax.random.key(0), OPTIMIZERS[optimizer]()
    if stage is None:
        model = models.build(size, layers=layers, scan=scan)
        step = train_step_of(model, cast=models.cast_to_bf16, fused_loss=True)
        create = jax.jit(create_state_of(model, tx))
        return functools.partial(create, key), jax.jit(step, donate_argnums=0)
    config = {**JSON, "zero_optimization": {"stage": stage, **(offload or {})}}
    zero = zerojax.zero(config, mesh=zerojax.mesh(1))
    model = models.build(size, zero.per_device, layers, scan)
    decorated = zero(train_step_of(model, fused_loss=True))
    return functools.partial(zero.init, create_state_of(model, tx), key), decorated


def program_bytes(step: Any, state: Any, batch: Any) -> int:
    """Device memory of the step's largest program; JAX's cache has it compiled."""
    if hasattr(step, "programs"):
        return compiled_bytes(step, state, batch)
    return bytes_of(step.lower(state, batch).compile())


def decorator(calls: int) -> dict[str, Any]:
    """``benchmarks.step_time`` on this device."""
    timings = step_time.gpt(calls), step_time.many_leaves(calls)
    return {
        each.what: {
            "ratio": each.ratio,
            "seconds": statistics.median(each.decorated.seconds),
            "added": each.overhead,
        }
        for each in timings
    }


def saving(gigabytes: float) -> dict[str, Any]:
    """``benchmarks.checkpoint``: seconds beside plain orbax."""
    with tempfile.TemporaryDirectory() as folder:
        turns = take_turns(gigabytes, 1, Path(folder), zerojax.mesh(1), cold=False)
    return {each.what: {by: each.median(by) for by in each.seconds} for each in turns.timings} | {
        "state_bytes": turns.state_bytes
    }


def precisions(steps: int, model: str) -> dict[str, Any]:
    """``benchmarks.precision``: losses of the main job in bf16 and fp16 beside fp32's."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            precision.run(name, steps, model, Path(folder), evaluations=5)
            for name in precision.PRECISIONS
        ]
    return {
        each.precision: {
            "tokens_per_second": each.tokens_per_second,
            "held_out": each.held_out[-1][1],
            "held_out_apart": each.parts_from(runs[0])[0],
        }
        for each in runs
    }
