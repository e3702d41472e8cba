"""Rates that evaluations decide are those of torch and transformers, recorded."""

from typing import Any

import numpy as np
import pytest

from zerojax.config import ConfigError
from zerojax.trainer.metric_rates import MetricRate

# Of `transformers.get_scheduler` of transformers 5.24 with torch 2.13 from the
# rate 0.1 on, stepped with VALUES: the rate after each.
VALUES = [
    2.0, 1.86, 1.71, 1.57, 1.43, 1.29, 1.14, 1.0, 1.0, 0.997, 1.01, 1.0, 0.989, 1.01, 1.03, 1.02,
     0.986, 0.975, 0.988, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.484, 0.589, 0.538, 0.563, 0.573,
     0.584, 0.621, 0.652, 0.594, 0.668, 0.567, 0.618,
]  # fmt: skip
RECORDED: tuple[tuple[dict[str, Any], list[float]], ...] = (
    ({}, [*[0.1] * 37, 0.010000000000000002]),
    ({"patience": 1, "factor": 0.5, "cooldown": 2, "threshold": 0.01},
     [*[0.1] * 9, *[0.05] * 5, *[0.025] * 5, *[0.0125] * 9, *[0.00625] * 4, *[0.003125] * 4,
     *[0.0015625] * 2]),
    ({"mode": "max", "patience": 2, "factor": 0.5, "threshold_mode":
     "abs", "threshold": 0.01, "min_lr": 0.01}, [*[0.1] * 3, *[0.05] * 3, *[0.025] * 3, *[0.0125]
     * 3, *[0.01] * 26]),
)  # fmt: skip


@pytest.mark.parametrize(("options", "rates"), RECORDED)
def test_rates(options: dict[str, Any], rates: list[float]) -> None:
    rate = MetricRate(0.1, options)
    ours = [rate(VALUES[: n + 1]) for n in range(len(VALUES))]
    np.testing.assert_allclose(ours, rates, rtol=1e-12)


def test_wrong_options_are_named() -> None:
    for options, says in (
        ({"patence": 1}, "did you mean `patience`"),
        ({"mode": "least"}, "mode = 'least' is none of min, max"),
        ({"threshold_mode": "absolute"}, "is none of rel, abs"),
        ({"factor": 1.5}, "factor must be between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=says):
            MetricRate(0.1, options)
