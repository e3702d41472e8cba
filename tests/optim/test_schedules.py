"""Schedules against records of DeepSpeed and against its formulas in plain Python."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from zerojax.config import ConfigError
from zerojax.optim.schedules import (
    momentum_schedule,
    schedule,
)

RECORD = Path(__file__).parents[1] / "data" / "peers" / "fp16_overflow_warmup.json"

LINEAR = {"warmup_num_steps": 10, "warmup_type": "linear"}


def rates(kind, params, counts, base_lr=1e-3):
    rate = jax.jit(schedule({"type": kind, "params": params}, base_lr))
    return [float(rate(count)) for count in counts]


def test_stairs_are_said_to_have_no_effect():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}
    with pytest.warns(UserWarning, match="cycle_first_stair_count without effect, as in DeepSpeed"):
        got = rates("OneCycle", {**params, "cycle_first_stair_count": 2}, range(9))
    assert got == rates("OneCycle", params, range(9))


def test_a_recorded_run_with_skipped_steps():
    run = json.loads(RECORD.read_text())
    rate = schedule(run["config"]["scheduler"], run["config"]["optimizer"]["params"]["lr"])
    # The updates made before a step: all steps before it but those that were skipped.
    skipped = [0, *(row["skipped_total"] for row in run["rows"][:-1])]
    got = [float(rate(step - gone)) for step, gone in enumerate(skipped)]
    np.testing.assert_allclose(got, [row["lr_used"] for row in run["rows"]], rtol=0, atol=1e-9)


def double(kind, p):
    """DeepSpeed's formulas in Python's floats, after deepspeed.md; t = -1 is the start value."""
    w, total = max(2, p.get("warmup_num_steps", 0)), p.get("total_num_steps", 0)

    def warm(t):
        return math.log(t + 1) / math.log(w) if p["warmup_type"] == "log" else t / w

    def rate(t):
        if kind in ("WarmupLR", "WarmupDecayLR"):
            low, high = p["warmup_min_lr"], p["warmup_max_lr"]
            if t < 0:
                return low
            after = 1.0 if kind == "WarmupLR" else max(0, (total - t) / max(1, total - w))
            return low + (high - low) * (warm(t) if t < w else after)
        if kind == "WarmupCosineLR":
            if t < 0:
                return 0.0
            r, c = p["warmup_min_ratio"], p["cos_min_ratio"]
            if t < w:
                return 1e-3 * (r + (1 - r) * warm(t))
            # Python's own cosine cancels near the end; its half angle does not.
            x = min(1, (t - w + 1) / max(1, total - w))
            return 1e-3 * (c + (1 - c) * math.cos(math.pi * x / 2) ** 2)
        if kind == "OneCycle":
            low, high = p["cycle_min_lr"], p["cycle_max_lr"]
            up, down = p["cycle_first_step_size"], p["cycle_second_step_size"]
            n = t + 1
            if t < up + down:
                return low + (high - low) * (n / up if n <= up else (up + down - n) / down)
            return low / (1 + p["decay_lr_rate"] * (n - up - down) / p["decay_step_size"])
        i = (t + 1) / p["lr_range_test_step_size"]
        i = math.floor(i) if p["lr_range_test_staircase"] else i
        return p["lr_range_test_min_lr"] * (1 + p["lr_range_test_step_rate"] * i)

    return rate


LONG = 1_000_000
WARM = {"warmup_num_steps": 30_000, "warmup_type": "log"}
RUNS = [
    *(
        ("WarmupLR", {"warmup_num_steps": steps, "warmup_type": kind, "warmup_min_lr": 1e-5,
                      "warmup_max_lr": 3e-4})
        for steps in (1, 2, 50) for kind in ("log", "linear")
    ),
    ("WarmupDecayLR", {**LINEAR, "total_num_steps": 30, "warmup_min_lr": 0.0,
                       "warmup_max_lr": 2e-3}),
    ("WarmupCosineLR", {**LINEAR, "total_num_steps": 30, "warmup_min_ratio": 0.1,
                        "cos_min_ratio": 0.01}),
    ("WarmupLR", {**WARM, "warmup_min_lr": 1e-6, "warmup_max_lr": 1e-3}),
    ("WarmupLR", {"warmup_num_steps": 777_777, "warmup_type": "linear", "warmup_min_lr": 0.0,
                  "warmup_max_lr": 1e-3}),
    ("WarmupDecayLR", {**WARM, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3,
                       "total_num_steps": LONG}),
    ("WarmupCosineLR", {**WARM, "warmup_min_ratio": 0.01, "cos_min_ratio": 0.0,
                        "total_num_steps": LONG}),
    ("WarmupCosineLR", {**WARM, "warmup_type": "linear", "warmup_min_ratio": 0.0,
                        "cos_min_ratio": 1e-4, "total_num_steps": 10 * LONG}),
    ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_first_step_size": 300_000,
                  "cycle_second_step_size": 600_001, "decay_lr_rate": 0.3,
                  "decay_step_size": 1000}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 999,
                     "lr_range_test_step_rate": 0.5, "lr_range_test_staircase": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 1e-6, "lr_range_test_step_size": 999,
                     "lr_range_test_step_rate": 0.5, "lr_range_test_staircase": True}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params"), RUNS)
def test_formulas_over_short_and_long_runs(kind, params):
    counts = np.unique(
        np.concatenate([
            np.arange(80), np.geomspace(1, LONG + 5, 500).astype(int),
            LONG - np.geomspace(1, LONG - 1, 500).astype(int), LONG + np.arange(-4, 4),
        ])
    )  # fmt: skip
    got = np.float64(jax.jit(schedule({"type": kind, "params": params}, 1e-3))(counts))
    want = np.array([double(kind, params)(int(n) - 1) for n in counts])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-30)
    assert np.abs(got - want)[want <= 1e-3].max() < 1e-9


def test_momentum_is_cycled_against_the_rate():
    params = {
        "cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4,
        "cycle_second_step_size": 6, "cycle_min_mom": 0.8, "cycle_max_mom": 0.95,
        "decay_mom_rate": 0.01, "decay_step_size": 3,
    }  # fmt: skip
    rate = schedule({"type": "OneCycle", "params": params}, 1.0)
    momentum = jax.jit(momentum_schedule({"type": "OneCycle", "params": params}))
    # DeepSpeed starts at the minimum; from then on it mirrors the rate.
    assert float(momentum(0)) == pytest.approx(0.8)
    for count in range(1, 11):
        mirrored = 0.95 - 0.15 * float(rate(count))
        assert float(momentum(count)) == pytest.approx(mirrored, abs=1e-6)
    assert [float(momentum(n)) for n in (11, 14, 20)] == pytest.approx(
        [0.95 * (1 + 0.01 * n / 3) for n in (1, 4, 10)]
    )
    flat = {**params, "decay_step_size": 0}
    assert float(momentum_schedule({"type": "OneCycle", "params": flat})(50)) == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("scheduler", "says"),
    [
        ({"type": "WarmupRL"}, 'did you mean "WarmupLR"'),
        ({"params": {}}, "scheduler.type: missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "params.warmup_num_steps`"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "at least 1, got 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, '"log", "linear"'),
        ({"type": "WarmupDecayLR"}, "total_num_steps: missing; expected an integer"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 3}}, "the step counter"),
        (
            {"type": "WarmupDecayLR", "params": {"total_num_steps": 2**31}},
            "total_num_steps: 2147483648 steps are more than the counters hold",
        ),
        (
            {
                "type": "OneCycle",
                "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0},
            },
            "cycle_max_mom: expected a number from 0 to below 1",
        ),
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
