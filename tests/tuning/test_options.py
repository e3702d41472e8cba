"""The search for options of XLA, on made-up forecasts and on a small model compiled for GPUs."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import linen as nn

import zerojax
from zerojax.config import load
from zerojax.foresight.choice import Choice
from zerojax.foresight.trials import Trial
from zerojax.tuning.options import CANDIDATES, search_options
from zerojax.tuning.workload import workload
from zerojax.xla import compat
from zerojax.xla.compiler import knows

CHOICE = Choice(stage=3, micro=1)
SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"


class MadeUp:
    """Trials in which the scheduler saves time, and neither combined collectives nor buffers in
    symmetric memory fit."""

    def __init__(self) -> None:
        self.seen: list[Choice] = []

    def tried(self, choice: Choice) -> Any:
        self.seen.append(choice)
        options = dict(choice.xla)
        if "xla_gpu_experimental_parallel_collective_overlap_limit" in options:
            return None
        too_large = {"xla_gpu_all_gather_combine_threshold_bytes", SYMMETRIC}
        fits = too_large.isdisjoint(options)
        return forecast(1.0 if SCHEDULER in options else 2.0, fits)


def forecast(seconds: float, fits: bool = True) -> Any:
    return SimpleNamespace(seconds=seconds, fits=fits, tokens=8, recomputes=False)


BEST = Trial(CHOICE, forecast(2.0))


def test_what_fits_is_ranked_by_the_forecast() -> None:
    trials: Any = MadeUp()
    ranking = search_options(trials, BEST, (), 100.0)
    assert [each.seconds for each in ranking] == [1.0, 1.0, 2.0]
    assert ranking[-1].choice == CHOICE
    known = [c for c in CANDIDATES if all(itertools.starmap(knows, c.items()))]
    assert len(trials.seen) == 1 + len(known) >= len(CANDIDATES)


def test_by_running() -> None:
    trials: Any = MadeUp()
    times = iter([3.0, None, 5.0])
    ranking = search_options(trials, BEST, (), 100.0, lambda choice: next(times))
    assert [each.seconds for each in ranking] == [3.0, 5.0]
    assert ranking[0].choice == CHOICE  # whatever the forecast says


def test_what_the_config_has_stays() -> None:
    trials: Any = MadeUp()
    search_options(trials, BEST, (SCHEDULER,), 100.0)
    assert all(SCHEDULER not in dict(choice.xla) for choice in trials.seen)
    assert len(set(trials.seen)) == len(trials.seen) < 1 + len(CANDIDATES)


@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_a_choice_is_written_as_a_config(candidate: dict[str, Any]) -> None:
    choice = Choice(stage=3, micro=1, xla=tuple(candidate.items()))
    made = choice.json({"xla": {"xla_gpu_enable_while_loop_unrolling": None}}, 8)
    config = load(json.loads(json.dumps(made)))
    assert config.xla_options == candidate
    assert choice.config(load({}), 8).xla_options == candidate
    assert "xla" not in Choice(stage=3, micro=1).json({}, 8)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        return nn.Dense(128)(nn.Embed(128, 1024)(tokens))


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_the_step_is_compiled_with_the_configs_options(offload: str | None) -> None:
    zero = zerojax.zero(
        stage=3,
        offload_optimizer=offload,
        xla_gpu_enable_latency_hiding_scheduler=True,
        xla_gpu_reduce_scatter_combine_threshold_bytes=7,
        mesh=zerojax.topology("h100", 8),
    )
    made = workload(Model, zero, 8, 16)
    state = zero.abstract_state(made.create_state, jax.random.key(0))
    lowered = zero(made.train_step).lower(state, made.batch)
    options = compat.compiler_options(lowered)
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == 7
