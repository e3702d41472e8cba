"""Part 3: the training steps of models under zerojax, and the same steps in plain jit."""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import zerojax
from benchmarks import precision, step_time
from benchmarks.checkpoint_times import take_turns
from benchmarks.gpu_day import models
from benchmarks.measure import create_state_of, train_step_of

JSON: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}


def decorated(
    size: Mapping[str, Any],
    rows: int,
    seq: int,
    stage: int = 3,
    layers: str = models.FUSED,
    scan: bool = True,
    steps: int = 8,
    offload: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The step under zerojax in bf16 with AdamW; ``offload`` joins "zero_optimization"."""
    config = {**JSON, "zero_optimization": {"stage": stage, **(offload or {})}}
    zero = zerojax.zero(config, mesh=zerojax.mesh(1))
    model = models.build(size, zero.per_device, layers, scan)
    state = zero.init(create_state_of(model), jax.random.key(0))
    step = zero(train_step_of(model, fused_loss=True))
    _, times = models.run_steps(step, state, models.batch_of(size, rows, seq), steps)
    return models.figures(size, rows, seq, times)


def plain(
    size: Mapping[str, Any],
    rows: int,
    seq: int,
    layers: str = models.FUSED,
    scan: bool = True,
    steps: int = 8,
) -> dict[str, Any]:
    """The step in ``jax.jit``: the parameters cast to bf16, the state donated."""
    model = models.build(size, layers=layers, scan=scan)
    state = jax.jit(create_state_of(model))(jax.random.key(0))
    step = jax.jit(
        train_step_of(model, cast=models.cast_to_bf16, fused_loss=True), donate_argnums=0
    )
    _, times = models.run_steps(step, state, models.batch_of(size, rows, seq), steps)
    return models.figures(size, rows, seq, times)


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
