"""What a config leaves open, beside keys that exclude some of it."""

from typing import Any

import pytest

from zerojax.config import load
from zerojax.tuning.space import left_open

LOCO = {"zero_quantized_gradients": True, "zeropp_loco_param": {}}
ONE_BIT = {"gradient_clipping": 0, "optimizer": {"type": "onebitadam", "params": {}}}


@pytest.mark.parametrize(
    ("config", "stages", "offloads"),
    [
        ({}, (0, 1, 2, 3), 3),
        ({"zero_optimization": LOCO}, (1, 2, 3), 1),
        ({"zero_optimization": {"zero_quantized_weights": True}}, (1, 2, 3), 3),
        ({"zero_optimization": LOCO | {"stage": 3}}, (3,), 1),
        (ONE_BIT, (0, 1), 1),
    ],
)
def test_the_stages_and_offloads_that_may_be_tried(
    config: Any, stages: tuple[int, ...], offloads: int
) -> None:
    space, fixed = left_open(config, 64, 8, [None])
    assert (space.stages, len(space.offloads)) == (stages, offloads)
    load(space.furthest(fixed, 8))  # no contradiction
