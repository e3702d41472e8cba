"""What it saves, and costs, that parameters stay gathered over an update: eight H100s."""

import functools
from dataclasses import replace

import pytest

from benchmarks.measure import Case, Record, compile_case

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

DROPPED = Case(
    stage=3, scan=True, n_layer=8, n_embd=1024, n_head=16, vocab_size=4096, block_size=512,
    micro_batch=1,
)  # fmt: skip
KEPT = replace(DROPPED, live=2**40)


@functools.cache
def record(case: Case) -> Record:
    return compile_case(case)


def units(found: Record, kind: str) -> float:
    """Passes over all parameters."""
    devices = found.case.group
    return found.moved_bytes.get(kind, 0) / (2 * found.parameters * (devices - 1) / devices)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 4},
        pytest.param({"scan": False, "n_layer": 4}, marks=pytest.mark.sweep),
        pytest.param({"devices": 16, "replicas": 2, "accumulate": 4}, marks=pytest.mark.sweep),
        pytest.param({"devices": 16, "partition": 8}, marks=pytest.mark.sweep),
        pytest.param({"precision": "fp16"}, marks=pytest.mark.sweep),
    ],
)
def test_one_gather_an_update_and_as_many_scatters_as_before(changes: dict[str, int]) -> None:
    found = record(replace(KEPT, **changes))
    k = found.case.accumulate
    assert units(found, "all-gather") == pytest.approx(1, abs=0.03)
    assert 0.9 * k < units(found, "reduce-scatter") < 1.1 * k
    assert found.all_to_all == 0
    assert set(found.gather_dtypes) == {"bf16" if found.case.precision == "bf16" else "f16"}


def test_three_units_fall_to_two() -> None:
    dropped, kept = record(DROPPED), record(KEPT)
    total = {each: sum(units(each, kind) for kind in each.moved_bytes) for each in (dropped, kept)}
    assert total[dropped] == pytest.approx(3.1, abs=0.1)
    assert total[kept] == pytest.approx(2.05, abs=0.1)
    # The parameters whole, and not twice; what lies between steps is the same.
    assert kept.resting_bytes == dropped.resting_bytes
    assert kept.peak_bytes - dropped.peak_bytes < 1.25 * 2 * kept.parameters


def test_half_of_them_halve_what_is_saved() -> None:
    """Two of the four stacks are as large as all others."""
    found = record(replace(KEPT, live=8 * 4 * 1024 * 1024 + 1))
    assert units(found, "all-gather") == pytest.approx(2 - 1 / 3, abs=0.1)
