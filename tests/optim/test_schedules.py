"""Schedules against records of DeepSpeed and against its formulas in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.config import ConfigError, SchedulerConfig
from zerojax.optim.schedules import schedule

LINEAR = {"warmup_num_steps": 10, "warmup_type": "linear"}


def rates(kind, params, counts, base_lr=1e-3):
    rate = jax.jit(schedule({"type": kind, "params": params}, base_lr))
    return [float(rate(count)) for count in counts]


def warmup(t, w, kind):
    return math.log(t + 1) / math.log(w) if kind == "log" else t / w


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_warmup_lr(kind, steps):
    params = {
        "warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4,
        "warmup_num_steps": steps, "warmup_type": kind,
    }  # fmt: skip
    w = max(2, steps)
    want = [1e-5] + [1e-5 + (3e-4 - 1e-5) * (warmup(t, w, kind) if t < w else 1) for t in range(80)]
    np.testing.assert_allclose(rates("WarmupLR", params, range(81)), want, rtol=0, atol=1e-9)


def test_warmup_lr_rises_to_the_optimizers_rate():
    assert rates("WarmupLR", LINEAR, [0, 1, 2, 11, 12], base_lr=0.5) == pytest.approx(
        [0, 0, 0.05, 0.5, 0.5]
    )


def test_warmup_decay_lr():
    params = {**LINEAR, "total_num_steps": 30, "warmup_max_lr": 2e-3}
    want = [0.0] + [2e-3 * (t / 10 if t < 10 else max(0, (30 - t) / 20)) for t in range(40)]
    np.testing.assert_allclose(rates("WarmupDecayLR", params, range(41)), want, rtol=0, atol=1e-9)


def test_warmup_cosine_lr():
    params = {**LINEAR, "total_num_steps": 30, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01}

    def ratio(t):
        if t < 10:
            return 0.1 + 0.9 * t / 10
        return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1, (t - 9) / 20))) / 2

    want = [0.0] + [1e-3 * ratio(t) for t in range(50)]
    np.testing.assert_allclose(rates("WarmupCosineLR", params, range(51)), want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("second", [None, 5])
def test_one_cycle(second):
    params = {
        "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 8,
        "cycle_second_step_size": second, "decay_lr_rate": 0.5, "decay_step_size": 4,
        "cycle_momentum": False,
    }  # fmt: skip
    both = 8 + (second or 8)

    def lr(t):
        if t < both:
            share = (t + 1) / 8 if t + 1 <= 8 else (both - t - 1) / (both - 8)
            return 1e-4 + 9e-4 * share
        return 1e-4 / (1 + 0.5 * (t - both + 1) / 4)

    want = [1e-4] + [lr(t) for t in range(40)]
    np.testing.assert_allclose(rates("OneCycle", params, range(41)), want, rtol=0, atol=1e-9)


def test_one_cycle_without_decay_ends_at_the_minimum():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    assert rates("OneCycle", params, range(7)) == pytest.approx([0.1, 0.55, 1, 0.55, 0.1, 0.1, 0.1])
    with pytest.raises(ConfigError, match="set cycle_momentum to false"):
        rates("OneCycle", {**params, "cycle_momentum": True}, [0])


@pytest.mark.parametrize("stairs", [False, True])
def test_lr_range_test(stairs):
    params = {
        "lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 5,
        "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": stairs,
    }  # fmt: skip
    want = [1e-4 * (1 + 2 * (n // 5 if stairs else n / 5)) for n in range(30)]
    np.testing.assert_allclose(rates("LRRangeTest", params, range(30)), want, rtol=0, atol=1e-9)


# Recorded with DeepSpeed 0.19.8: fp16 with an initial scale of 2^24, WarmupLR, linear, 10 steps to
# 1e-3. (lr used, skipped steps so far) by step.
RECORDED_SKIPS = [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7, *[8] * 18]
RECORDED_LR = [0.0] * 9 + [
    1e-4, 2e-4, 3e-4, 4e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4, 9e-4, *[1e-3] * 11
]  # fmt: skip


def test_a_recorded_run_with_skipped_steps():
    # The updates made before a step: all steps before it but those that were skipped.
    counts = [s - skipped for s, skipped in enumerate([0, *RECORDED_SKIPS[:-1]])]
    np.testing.assert_allclose(
        rates("WarmupLR", {**LINEAR, "warmup_max_lr": 1e-3}, counts), RECORDED_LR, rtol=0, atol=1e-9
    )


def test_counts_of_any_shape_and_type():
    rate = schedule(SchedulerConfig(type="WarmupLR", params=LINEAR), 1.0)
    many = rate(jnp.arange(12))
    assert many.shape == (12,)
    assert many.dtype == jnp.float32
    np.testing.assert_allclose(many, [float(rate(n)) for n in range(12)], atol=1e-7)
    assert float(rate(np.int64(6))) == pytest.approx(0.5)
    assert float(rate(2**31 - 1)) == 1.0


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"type": "WarmupRL"}, 'did you mean "WarmupLR"'),
        ({"type": "Polynomial"}, "known: WarmupLR"),
        ({"params": {}}, "scheduler.type: missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "did you mean `warmup_num_steps`"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "at least 1, got 0"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}, "got 2.5"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, '"log", "linear"'),
        ({"type": "WarmupDecayLR"}, "total_num_steps: WarmupDecayLR needs it"),
        ({"type": "OneCycle"}, "cycle_min_lr: OneCycle needs it"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 3}}, "the step counter"),
        (3, "scheduler: expected an object"),
    ],
)
def test_bad_schedules(scheduler, says):
    with pytest.raises(ConfigError) as caught:
        schedule(scheduler, 1e-3)
    assert says in str(caught.value)


def test_a_run_shorter_than_its_warm_up_is_warned_of():
    with pytest.warns(UserWarning, match="total_num_steps 5 is less than warmup_num_steps 10"):
        schedule({"type": "WarmupDecayLR", "params": {**LINEAR, "total_num_steps": 5}}, 1e-3)
