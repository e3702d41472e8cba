"""The share of the time in which pipeline stages idle."""

import re

import pytest

import zerojax
from zerojax.pipeline.schedule import Schedule


@pytest.mark.parametrize(
    ("stages", "micro_batches", "says"),
    [
        (4, 2, "4 pipeline stages and 4 micro-batches each stage idles 43% .* = 12 lowers .* 20%$"),
        (8, 8, "idles 47% .* = 32 lowers that to 18%$"),  # a multiple of the stages
        (2, 1, "^$"),
        (4, 6, "^$"),
    ],
)
def test_a_warning_from_a_third_on(stages: int, micro_batches: int, says: str) -> None:
    mesh = zerojax.mesh(stages, axes={"stage": stages, "data": 1})
    assert (schedule := Schedule.of(mesh, micro_batches))
    assert re.search(says, schedule.advice)
