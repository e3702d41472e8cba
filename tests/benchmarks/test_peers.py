"""The trajectories recorded from DeepSpeed itself, step for step."""

import pytest

from benchmarks.peers import RECORDS, distance

pytestmark = pytest.mark.usefixtures("quick_compile")
LOSS = dict(zip(RECORDS, (2e-4, 1e-3, 1e-2), strict=True))


@pytest.mark.parametrize("record", RECORDS)
def test_the_record_is_reproduced(record: str) -> None:
    off = distance(record, stage=3, devices=8)
    assert off.loss < LOSS[record]
    assert off.learning_rate < 1e-9
    assert off.loss_scales == off.skipped == 0
    if record.startswith("fp32"):
        assert off.grad_norm < 1e-3
