"""The table of all stages, for configs with keys that only some stages have."""

import pytest

import zerojax
from examples.run_clm.report import at_stage


@pytest.mark.parametrize("stage", range(4))
def test_a_config_at_every_stage(stage: int) -> None:
    config = zerojax.ZeroConfig.from_keywords(
        stage=3,
        zero_hpz_partition_size=4,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
    )
    found = at_stage(config, stage)
    assert found.stage == stage
    assert found.zero_quantized_gradients == (stage >= 1)
    assert found.zero_hpz_partition_size == (4 if stage == 3 else 1)
