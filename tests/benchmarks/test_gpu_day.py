"""The day on a GPU, rehearsed: every measurement at toy size, and what becomes of the figures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import forecasts, kernels, models, plan, summary, worker
from benchmarks.gpu_day.__main__ import main, run
from benchmarks.gpu_day.journal import Journal
from benchmarks.gpu_day.measurement import ERROR, PARTS, Measurement, errors
from benchmarks.gpu_day.processes import Workers
from benchmarks.kernels import Cost
from zerojax.devices.rates import rates

TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
H100 = "NVIDIA H100 80GB HBM3"
FIRST = {
    "losses beside plain jit, 1",
    "rates of the device",
    "GPT-2 XL",
    "kernels, 1",
    "update from the host",
}
"""One of each kind for every run of the tests; the others are sweeps."""


def _rehearsals() -> list[Any]:
    made = []
    for each in plan.measurements(toy=True):
        marks = [] if each.name in FIRST else [pytest.mark.sweep]
        if each.function.startswith("torch_peers:"):
            reason = "torch and transformers are not installed"
            marks.append(pytest.mark.skipif(not TORCH, reason=reason))
        if each.part == PARTS.index("XLA options") + 1:
            marks.append(pytest.mark.gpu_compile)
        made.append(pytest.param(each, id=each.name, marks=marks))
    return made


@pytest.mark.parametrize("measurement", _rehearsals())
def test_a_measurement_at_toy_size(
    measurement: Measurement, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    compiles = request.node.get_closest_marker("gpu_compile")
    request.getfixturevalue("require_gpu_compiler" if compiles else "quick_compile")
    arguments = json.loads(json.dumps(dict(measurement.arguments)))  # as a worker has them
    out = tmp_path / "figures.json"
    found = worker.perform(measurement.function, arguments, out)
    assert json.loads(out.read_text()).keys() == found.keys()
    # No simulator is as fast as to be timed, and DeepSpeed is not installed for tests.
    expected = ("mosaic_gpu", "fused kernels")
    wrong = [(at, text) for at, text in errors(found) if not any(e in at for e in expected)]
    assert [text for _, text in wrong if "deepspeed is not installed" not in text] == []


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


class FakeWorkers(Workers):
    """Measures nothing, and notes what was asked for."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, measurement: Measurement, seconds: float, more: bool) -> dict[str, Any]:
        self.ran.append(measurement.name)
        return {ERROR: "broken"} if measurement.name == "b" else {"figure": 1.0}

    def together(self, measurements: Sequence[Measurement], seconds: float) -> list[dict[str, Any]]:
        self.ran.append(" and ".join(each.name for each in measurements))
        return [{"figure": 1.0} for _ in measurements]

    def close(self) -> None:
        pass


def _measurement(name: str, seconds: float, together: bool = False) -> Measurement:
    function = "smoke:report"
    return Measurement(
        name=name, part=1, tier=1, function=function, seconds=seconds, together=together
    )


def test_a_day_goes_on_after_errors_within_its_budget_and_where_it_ended(tmp_path: Path) -> None:
    wanted = [_measurement(*each) for each in (("a", 5e3), ("b", 5e3), ("long", 5e4), ("c", 5e3))]
    wanted += [_measurement(name, 5e3, together=True) for name in ("x", "y")]
    first, second = FakeWorkers(), FakeWorkers()
    run(wanted, Journal(tmp_path, H100), time.monotonic() + 2e4, first)
    assert first.ran == ["x and y", "a", "b", "c"]
    run(wanted, Journal(tmp_path, H100), time.monotonic() + 1e5, second)
    assert second.ran == ["long"]
    assert Journal(tmp_path, H100).failed() == ["b"]
    assert not Journal(tmp_path, "another device").known("a")


def test_the_command_lists_what_is_owed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--toy", "--list", "--part", "3", "--record", str(tmp_path)])
    said = capsys.readouterr().out
    assert "GPT-2 XL, torch FSDP2" in said
    assert "owed" in said
    assert "kernels, 1" not in said
    assert [*tmp_path.iterdir()] == []


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
