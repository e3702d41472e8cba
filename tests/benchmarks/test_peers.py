"""The trajectories recorded from DeepSpeed itself, step for step."""

import pytest

from benchmarks.peers import RECORDS, distance

pytestmark = pytest.mark.usefixtures("quick_compile")
# One device has nothing to shard: two stages will do there.
RUNS = [(3, 8), *(pytest.param(*run, marks=pytest.mark.sweep)
                  for run in ((0, 8), (1, 8), (2, 8), (0, 1), (3, 1)))]  # fmt: skip

LOSS = dict(zip(RECORDS, (2e-4, 1e-3, 1e-2), strict=True))


@pytest.mark.parametrize(("stage", "devices"), RUNS)
@pytest.mark.parametrize("record", RECORDS)
def test_the_record_is_reproduced(record: str, stage: int, devices: int) -> None:
    off = distance(record, stage, devices)
    assert off.loss < LOSS[record]
    assert off.learning_rate < 1e-9
    assert off.loss_scales == off.skipped == 0
    if record.startswith("fp32"):
        assert off.grad_norm < 1e-3
