"""Keys that nobody knows: which is meant."""

import pytest

from zerojax.config import ConfigError, load


def problems(config, **more):
    with pytest.raises(ConfigError) as caught:
        load(config, **more)
    return caught.value.problems


def test_a_dotted_key_is_to_be_nested():
    assert problems({"zero_optimization.stage": 3}) == (
        '"zero_optimization.stage": sections are objects; write '
        '{"zero_optimization": {"stage": ...}}',
    )


def test_a_long_key_is_cut():
    (problem,) = problems({"x" * 100_000: 1})
    assert len(problem) < 200
