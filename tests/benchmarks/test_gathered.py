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


def test_one_gather_an_update_and_as_many_scatters_as_before() -> None:
    found = record(replace(KEPT, scan=False, n_layer=2))
    k, case = found.case.accumulate, found.case
    # The tied table's gradients, as a lookup and as a head, meet before they are reduced in a
    # scanned model of one group alone: elsewhere the head's does not wait for the lookup's.
    alone = case.scan and case.replicas == case.partition == 1
    table = 0 if alone else case.vocab_size * case.n_embd / found.parameters
    assert units(found, "all-gather") == pytest.approx(1, abs=0.01)
    assert units(found, "reduce-scatter") == pytest.approx(k * (1 + table), rel=0.01)
    assert found.all_to_all == 0
    assert set(found.gather_dtypes) == {"bf16" if found.case.precision == "bf16" else "f16"}


@pytest.mark.sweep
def test_three_units_fall_to_two() -> None:
    dropped, kept = record(DROPPED), record(KEPT)
    total = [sum(units(each, kind) for kind in each.moved_bytes) for each in (dropped, kept)]
    assert total == pytest.approx([3, 2], abs=0.05)
    # The parameters unsharded, and not twice; what lies between steps is the same.
    assert kept.resting_bytes == dropped.resting_bytes
    assert kept.peak_bytes - dropped.peak_bytes < 1.25 * 2 * kept.parameters
