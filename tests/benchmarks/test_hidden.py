"""The table of what a step hides of its collectives."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.hidden import (
    MODELS,
    UNROLLED_LAYERS,
    Case,
    cases,
    compile_case,
    overlap_of,
)
from zerojax.foresight.forecast import Traffic

GB = 10**9


def forecast() -> Any:
    traffic = (
        Traffic("all-gather", ("bf16",), 3, 8 * GB, GB, 0.3, 0.01),
        Traffic("reduce-scatter", ("bf16",), 3, 4 * GB, GB, 0.1, 0.01),
        Traffic("to the host", (), 3, GB, 0, 0.5, 0.4),
    )
    return SimpleNamespace(traffic=traffic, seconds=1.5, peak=SimpleNamespace(bytes=6 * GB))


def test_copies_to_the_host_are_no_collectives() -> None:
    found = overlap_of(forecast())
    assert (found.step, found.collectives, found.exposed) == pytest.approx((1.5, 0.4, 0.02))
    assert found.hidden == pytest.approx(0.95)
    assert found.gathered == 8 * GB


def test_each_model_on_all_devices_without_and_with_overlap() -> None:
    chosen = cases([*MODELS], ["h100:8", "a100:8"])
    assert len(chosen) == len(set(chosen)) == 2 * 2 * 2 * 2 * 2
    depths: dict[str, set[int]] = {case.model: set() for case in chosen}
    for case in chosen:
        model: Any = case.function()
        assert model.config.scan is case.scan
        assert case.settings["overlap_comm"] is case.overlap
        depths[case.model].add(model.config.n_layer)
    assert depths == {"llama-7b": {32, UNROLLED_LAYERS}, "gpt2-xl": {48, UNROLLED_LAYERS}}


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_an_unrolled_model_hides_most_before_hopper() -> None:
    """With one collective under way at a time the share is 64%."""
    case = Case(model="llama-7b", scan=False, devices="a100:8", micro=1, overlap=True)
    assert compile_case(case).hidden > 0.75
