"""Part 5: the streamed optimizer and offloaded parameters, beside the pinned link."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

import zerojax
from benchmarks.gpu_day import models
from benchmarks.gpu_day.forecasts import link
from benchmarks.gpu_day.measurement import attempts
from benchmarks.gpu_day.training import JSON
from benchmarks.measure import create_state_of, train_step_of
from zerojax.plan.places import HOST

OPTIMIZER: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
BOTH: dict[str, Any] = {**OPTIMIZER, "offload_param": {"device": "cpu"}}


def streamed(
    size: Mapping[str, Any], tokens: int, steps: int = 4, nbytes: int = 2**30
) -> Iterator[dict[str, Any]]:
    """An update of an offloaded state, on so few tokens that the step does little else.

    The state's bytes in host memory go in and out once a step; their share is that of the link's
    rate each way while both ways are busy, measured in the same process.
    """
    rates: dict[str, float] = {}

    def measured_link() -> dict[str, float]:
        rates.update(link(nbytes))
        return rates

    def update() -> dict[str, Any]:
        config = {**JSON, "zero_optimization": {"stage": 2, **OPTIMIZER}}
        zero = zerojax.zero(config, mesh=zerojax.mesh(1))
        model = models.build(size, layers=models.OWN)
        state = zero.init(create_state_of(model), jax.random.key(0))
        moved = zero.plan(state).bytes_in(HOST)
        step = zero(train_step_of(model))
        _, times = models.run_steps(step, state, models.batch_of(size, 1, tokens), steps)
        rate = moved / times.in_a_row
        figures: dict[str, Any] = {
            "seconds": times.in_a_row,
            "first": times.first,
            "bytes_each_way": moved,
            "bytes_per_second_each_way": rate,
            "peak_bytes": models.peak_bytes(),
        }
        if rates:
            figures["share_of_link"] = rate / rates["each_way_at_once"]
        return figures

    yield from attempts({"link": measured_link, "update": update})
