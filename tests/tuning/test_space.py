"""What a config leaves open, beside keys that exclude some of it."""

from typing import Any

import pytest

from zerojax.config import load
from zerojax.foresight.choice import Choice
from zerojax.tuning.space import Batches, left_open


@pytest.mark.parametrize(
    ("config", "stages", "offloads"),
    [
        ({}, (0, 1, 2, 3), 3),
        ({"zero_optimization": {"zero_quantized_weights": True}}, (1, 2, 3), 3),
        ({"bf16": {"enabled": True}, "fp8": {"enabled": True}}, (3,), 1),
    ],
)
def test_the_stages_and_offloads_that_may_be_tried(
    config: Any, stages: tuple[int, ...], offloads: int
) -> None:
    space, fixed = left_open(config, 64, 8, [None])
    assert (space.stages, len(space.offloads)) == (stages, offloads)
    load(space.furthest(fixed, 8))  # no contradiction


@pytest.mark.parametrize(
    ("given", "micro", "accumulation"),
    [
        ({}, 2, 8),
        ({"rows": 8}, 2, 8),
        ({"micro": 8}, 8, 2),
        ({"accumulation": 1}, 16, 1),
        ({"micro": 8, "accumulation": 1}, 8, 1),
    ],
)
def test_pipeline_stages_have_the_same_rows(given: Any, micro: int, accumulation: int) -> None:
    """Unless the config has both sizes: a stage's devices are fewer."""
    before = Choice(stage=3, micro=8, offload="optimizer")
    choice = Batches(**given).in_stages(before, 2)
    assert (choice.micro, choice.accumulation) == (micro, accumulation)
    assert (choice.pipeline, choice.offload) == (2, "none")
    assert choice.rows(16) == before.rows(16) // (2 if len(given) == 2 else 1)
    config = choice.json({}, 16)
    assert config["train_batch_size"] == micro * accumulation * 8
