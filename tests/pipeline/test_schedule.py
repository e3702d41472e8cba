"""The share of the time in which pipeline stages idle."""

import re

import pytest

import zerojax
from zerojax.pipeline.schedule import Schedule


@pytest.mark.parametrize(
    ("stages", "micro_batches", "says"),
    [
        (2, 1, "gradient_accumulation_steps = 1 each stage idles 50% .* = 4 .* to 20%$"),
        (4, 4, "4 pipeline stages .* = 4 each stage idles 43% .* = 12 lowers that to 20%$"),
        (8, 8, "idles 47% .* = 32 lowers that to 18%$"),  # a multiple of the stages
        (2, 2, "^$"),
        (4, 6, "^$"),
    ],
)
def test_a_warning_from_a_third_on(stages: int, micro_batches: int, says: str) -> None:
    mesh = zerojax.mesh(stages, axes={"stage": stages, "data": 1})
    assert re.search(says, Schedule(mesh, micro_batches).advice)
