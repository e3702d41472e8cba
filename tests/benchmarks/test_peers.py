"""The trajectories recorded from DeepSpeed itself, step for step."""

import pytest

from benchmarks.peers import DEVICES, RECORDS, STAGES, distance

pytestmark = pytest.mark.usefixtures("quick_compile")
# Where one Python version alone does the sweep, the other does stage 3, where all is sharded.
EACH_STAGE = [*(pytest.param(stage, marks=pytest.mark.sweep) for stage in STAGES[:-1]), STAGES[-1]]

LOSS = dict(zip(RECORDS, (2e-4, 1e-3, 1e-2), strict=True))


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("stage", EACH_STAGE)
@pytest.mark.parametrize("record", RECORDS)
def test_the_record_is_reproduced(record: str, stage: int, devices: int) -> None:
    off = distance(record, stage, devices)
    assert off.loss < LOSS[record]
    assert off.learning_rate < 1e-9
    assert off.loss_scales == off.skipped == 0
    if record.startswith("fp32"):
        assert off.grad_norm < 1e-3
