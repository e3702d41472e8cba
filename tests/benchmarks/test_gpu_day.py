"""The day on a GPU, rehearsed: every measurement at toy size, and what becomes of the figures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from typing import Any

import pytest

from benchmarks.gpu_day import forecasts, kernels, models, plan, summary
from benchmarks.gpu_day.measurement import ERROR, PARTS
from benchmarks.kernels import Cost
from zerojax.devices.rates import rates

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize("toy", [False, True])
def test_every_order_can_be_carried_out(toy: bool) -> None:
    wanted = plan.measurements(toy)
    names = [each.name for each in wanted]
    assert len(set(names)) == len(names)
    assert {each.part for each in wanted} == set(range(1, len(PARTS) + 1))
    assert [each.tier for each in wanted] == sorted(each.tier for each in wanted)
    for each in wanted:
        module, name = each.function.split(":")
        assert module in plan.MODULES
        function = getattr(importlib.import_module(f"benchmarks.gpu_day.{module}"), name)
        inspect.signature(function).bind(**json.loads(json.dumps(dict(each.arguments))))
        assert each.seconds < 9 * 60


def test_rates_are_proposed_as_shares_of_the_peaks() -> None:
    matrix = {"bf16": dict.fromkeys(forecasts.SHAPES, 600e12)}
    found = {
        "matrix": matrix,
        "memory": {"bytes_per_second": 3.0e12},
        "host": {"to_the_host": 50e9, "to_the_device": 54e9, "each_way_at_once": 40e9},
        "launch": {ERROR: "none"},
    }
    made = forecasts.proposal(found, rates("h100"))
    assert made == {
        "host_share": 50 / 64,
    }
    assert forecasts.proposed(found, H100) == made
    assert forecasts.proposed(found, "cpu") == {}


def _cost(
    kernel: str, implementation: str, seconds: float | None, shape: str = "4"
) -> dict[str, Any]:
    cost = Cost(kernel, shape, implementation, 8 * 10**9, 0, 1, 0, 1.0, seconds)
    return {"costs": [cost.__dict__]}


def test_a_kernel_that_wins_everywhere_is_proposed() -> None:
    results = {
        "kernels, 1": {"a": _cost("good", "xla", 2.0), "b": _cost("good", "mosaic_gpu", 1.0)},
        "kernels, 2": {
            "copy": {"rate": 3e12},
            "a": _cost("slow", "xla", 2.0),
            "b": _cost("slow", "mosaic_gpu", 1.99),
            "c": _cost("none", "xla", 2.0),
            "d": {ERROR: "refused"},
            # Short calls take the time in which the host starts them.
            "e": _cost("good", "xla", 31e-6, "short"),
            "f": _cost("good", "mosaic_gpu", 34e-6, "short"),
        },
    }
    found, copy = kernels.costs(results.values())
    assert copy == 3e12
    assert kernels.faster(found, H100) == {"good": ("H100",)}
    titles = dict(summary.sections(results, H100))
    assert titles["Proposed for pallas_kernels/measured.py"] == "FASTER = {'good': ('H100',)}"


def test_steps_stand_beside_plain_jit() -> None:
    step = {"in_a_row": 0.5, "rows": 16, "seq": 1024, "mfu": 0.4, "bytes": 4 * 10**10}
    results = {
        "GPT-2 XL": {
            "stage 3": {**step, "tokens_per_second": 99.0, "turns": [0.4, 0.5]},
            "plain jit": {**step, "tokens_per_second": 100.0},
        },
        "GPT-2 XL, torch FSDP2": {**step, "tokens_per_second": 90.0},
        "broken": {ERROR: "out of memory"},
    }
    _, first, second, third = summary.steps(results)
    assert first == [
        "GPT-2 XL, stage 3", "16 x 1024", "500.0", "400 500", "99", "0.990", "40.0%", "40.00",
    ]  # fmt: skip
    assert second[5] == "1.000"
    assert (third[0], third[5]) == ("GPT-2 XL, torch FSDP2", "0.900")
    assert "# A day on a GPU" in summary.markdown(plan.measurements(), results, H100)


def test_flops_of_gpt2_and_llama() -> None:
    assert models.flops_a_token(models.GPT2_XL, 1024) == pytest.approx(6 * 1.555e9 + 0.944e9, 1e-2)
    whole = {**models.LLAMA_8B, "n_layer": 32}
    parameters = 8.03e9 - 128256 * 4096  # without the table that is only looked up
    attention = 12 * 32 * 4096 * 8192
    assert models.flops_a_token(whole, 8192) == pytest.approx(6 * parameters + attention, 1e-2)
