"""The schedules of transformers 5.23 with torch 2.15: 3 steps of warm-up, 11 in all, rate 1e-3."""

import numpy as np
import pytest

from zerojax.config import ConfigError
from zerojax.optim.schedules import OF_TRANSFORMERS, Run, schedule_of_transformers

WARMUP = [0.0, 0.00033333333, 0.00066666667]
# `transformers.get_scheduler(name, optimizer, 3, 11, options)`, from update 3 on.
RECORDED = {
    "linear": ({}, [0.001, 0.000875, 0.00075, 0.000625, 0.0005, 0.000375, 0.00025, 0.000125, 0, 0]),
    "cosine": (
        {},
        [0.001, 0.00096193977, 0.00085355339, 0.00069134172, 0.0005, 0.00030865828, 0.00014644661,
         3.8060234e-05, 0.0, 3.8060234e-05],
    ),
    "cosine_with_restarts": (
        {"num_cycles": 3},
        [0.001, 0.00069134172, 0.00014644661, 0.00096193977, 0.0005, 3.8060234e-05, 0.00085355339,
         0.00030865828, 0.0, 0.0],
    ),
    "cosine_with_min_lr": (
        {"min_lr_rate": 0.1},
        [0.001, 0.00096574579, 0.00086819805, 0.00072220754, 0.00055, 0.00037779246, 0.00023180195,
         0.00013425421, 0.0001, 0.00013425421],
    ),
    "polynomial": (
        {"power": 2.0, "lr_end": 1e-5},
        [0.001, 0.00076796875, 0.000566875, 0.00039671875, 0.0002575, 0.00014921875, 7.1875e-05,
         2.546875e-05, 1e-05, 1e-05],
    ),
    "constant": ({}, [0.001] * 10),
    "constant_with_warmup": ({}, [0.001] * 10),
    "inverse_sqrt": (
        {},
        [0.001, 0.0008660254, 0.00077459667, 0.00070710678, 0.00065465367, 0.00061237244,
         0.00057735027, 0.00054772256, 0.00052223297, 0.0005],
    ),
}  # fmt: skip
_FALL = [0.001, 0.00096574579, 0.00086819805, 0.00072220754, 0.00055, 0.00037779246, 0.00023180195,
         0.00013425421, 0.0001, 0.00013425421]  # fmt: skip
# Those with a warm-up of their own, from update 0 on.
RECORDED_FROM_0 = (
    ("warmup_stable_decay", {"num_decay_steps": 4},
     [*WARMUP, *[0.001] * 5, 0.00085355339, 0.0005, 0.00014644661, 0.0, 0.0]),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 2, "warmup_type": "cosine",
                             "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
     [0.0001, 0.000325, 0.000775, 0.001, 0.001, 0.001, 0.00055, 0.0003636039, 0.00022057714,
      *[0.0001] * 4]),
    ("warmup_stable_decay", {"num_decay_steps": 5, "warmup_type": "1-sqrt", "decay_type": "linear",
                             "min_lr_ratio": 0.2},
     [0.0002, 0.00034680274, 0.00053811978, *[0.001] * 4, 0.00084, 0.00068, 0.00052, 0.00036,
      0.0002, 0.0002]),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4},
     [0.00033333333, 0.00066666667, *_FALL, 0.00023180195]),
    ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
     [0.0002, 0.0006, *_FALL, 0.00023180195]),
)  # fmt: skip


@pytest.mark.parametrize(("name", "options", "rates"), RECORDED_FROM_0)
def test_a_schedule_with_its_own_warm_up_is_that_of_transformers(
    name: str, options: dict[str, object], rates: list[float]
) -> None:
    ours = schedule_of_transformers(name, Run(1e-3, 3, 11), options)(np.arange(13))
    np.testing.assert_allclose(ours, rates, rtol=2e-6, atol=2e-10)


def test_every_schedule_of_transformers_is_known() -> None:
    """``transformers.SchedulerType`` of 5.24, but for those that evaluations decide."""
    assert {*RECORDED, *(case[0] for case in RECORDED_FROM_0)} == {*OF_TRANSFORMERS}


@pytest.mark.parametrize("name", RECORDED)
def test_a_schedule_is_that_of_transformers(name: str) -> None:
    options, after = RECORDED[name]
    rate = schedule_of_transformers(name, Run(1e-3, 3, 11), options)(np.arange(13))
    warmup = [1e-3] * 3 if name == "constant" else WARMUP
    np.testing.assert_allclose(rate, [*warmup, *after], rtol=2e-6, atol=2e-10)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match="cosine has no num_cycle; did you mean `num_cycles`"):
        schedule_of_transformers("cosine", Run(1e-3, 0, 10), {"num_cycle": 2})
    with pytest.raises(ConfigError, match=r"lr_end = 0\.1 must be below 0\.001"):
        schedule_of_transformers("polynomial", Run(1e-3, 0, 10), {"lr_end": 0.1})
    with pytest.raises(ConfigError, match="takes min_lr or min_lr_rate"):
        schedule_of_transformers("cosine_with_min_lr", Run(1e-3, 0, 10))
    with pytest.raises(ConfigError, match="needs num_decay_steps"):
        schedule_of_transformers("warmup_stable_decay", Run(1e-3, 0, 10))
    options = {"num_decay_steps": 2, "decay_type": "log"}
    with pytest.raises(ConfigError, match="decay_type = 'log' is none of linear, cosine, 1-sqrt"):
        schedule_of_transformers("warmup_stable_decay", Run(1e-3, 0, 10), options)
