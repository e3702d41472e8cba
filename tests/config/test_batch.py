"""train = micro * accumulation * world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.config import BatchSizes, ConfigError, ZeroConfig

small = st.integers(1, 64)


def config(train=None, micro=None, steps=None):
    return ZeroConfig(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=steps,
    )


@given(small, small, small)
def test_any_two_give_the_third(micro, steps, world):
    train = micro * steps * world
    whole = BatchSizes(train, micro, steps)
    assert config(train, micro, steps).batch(world) == whole
    assert config(train, micro).batch(world) == whole
    assert config(train, None, steps).batch(world) == whole
    assert config(None, micro, steps).batch(world) == whole


@given(small, small)
def test_one_alone_means_no_accumulation(size, world):
    assert config(size * world).batch(world) == (size * world, size, 1)
    assert config(None, size).batch(world) == (size * world, size, 1)
    assert config(None, None, size).batch(world) == (None, None, size)
    assert config().batch(world) == (None, None, 1)


@given(st.integers(1, 500), st.none() | small, st.none() | small, small)
def test_a_solution_multiplies_out_or_is_refused(train, micro, steps, world):
    unit = (micro or 1) * (steps or 1) * world
    whole = train == unit if micro and steps else train % unit == 0
    if whole:
        found = config(train, micro, steps).batch(world)
        assert found.train == found.micro * found.accumulation * world
        return
    with pytest.raises(ConfigError) as caught:
        config(train, micro, steps).batch(world)
    for number in (train, world, micro, steps):
        assert number is None or str(number) in str(caught.value)


def test_the_error_names_settings_that_would_do():
    with pytest.raises(ConfigError) as caught:
        config(64, 4, 3).batch(8)
    text = str(caught.value)
    assert "train_batch_size = 64 is not train_micro_batch_size_per_gpu 4 *" in text
    assert "gradient_accumulation_steps 3 * 8 devices" in text
    assert "train_batch_size 96" in text
    assert "or gradient_accumulation_steps 2" in text
    with pytest.raises(ConfigError, match="train_batch_size 8 or 16"):
        config(10).batch(8)
    with pytest.raises(ConfigError, match=r"use train_batch_size 8$"):
        config(3).batch(8)


def test_sizes_in_pipeline_stages():
    """On 8 devices in 4 stages, all of which share the rows."""
    assert config(64, None, 8).batch(2, stages=4) == (64, 4, 8)
    with pytest.raises(ConfigError, match=r"of each of 4 .* use train_batch_size 16 or 32$"):
        config(20, None, 8).batch(2, stages=4)
    with pytest.raises(ConfigError, match=r"use train_batch_size 8, or 12 devices$"):
        config(12, 1, 4).batch(2, stages=4)
    with pytest.raises(ConfigError, match=r"divide among the 8 devices of 4 .* a multiple of 4"):
        config(None, 1, 2).batch(2, stages=4)
