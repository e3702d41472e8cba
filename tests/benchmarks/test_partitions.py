"""What a secondary shard in each host (hpZ) saves between hosts, and costs in memory: two hosts of
eight H100s."""

import functools
from dataclasses import replace

import pytest

from benchmarks.measure import (
    Case,
    Compiled,
    between_hosts,
    compile_step,
    expected_between,
    measure,
)

FLAT = Case(
    stage=3, devices=16, scan=True, n_layer=48, n_embd=1024, n_head=16, vocab_size=4096,
    block_size=512, micro_batch=1,
)  # fmt: skip
NEAR = replace(FLAT, partition=8)


@functools.cache
def compiled(case: Case) -> Compiled:
    return compile_step(case)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, 2),
        pytest.param({"accumulate": 2}, 3, marks=pytest.mark.sweep),
        pytest.param({"scan": False, "n_layer": 4}, 2, marks=pytest.mark.sweep),
        # Nothing divides by 24 here: two dimensions share the devices.
        pytest.param({"devices": 24}, 2, marks=pytest.mark.sweep),
    ],
)
def test_traffic_between_hosts_falls_from_3_passes_to_2(changes, passes):
    flat, near = replace(FLAT, **changes), replace(NEAR, **changes)
    found = {case: compiled(case) for case in (flat, near)}
    sent = {case: between_hosts(one.executable.as_text()) for case, one in found.items()}
    once = expected_between(flat, found[flat].parameters) / 3 / flat.accumulate
    assert expected_between(near, found[near].parameters) == pytest.approx(passes * once, rel=1e-6)
    # The tied table is two parameters to a step: one to look up in and one to multiply with. Where
    # it is gathered once, its gradient as a lookup changes places after the sum.
    tables = 2 * flat.accumulate * flat.vocab_size * flat.n_embd / once
    for case, theory in ((flat, 3 * flat.accumulate), (near, passes)):
        assert sum(sent[case].values()) / once == pytest.approx(theory + tables, rel=0.01)
        assert sent[case]["reduce-scatter"] / once > 0.95 * case.accumulate
    record = measure(near, found[near])
    assert record.total_moved_bytes < 1.09 * record.total_expected_moved_bytes
    # A lookup's gradient that two dimensions share, as on 24 devices, is all-reduced.
    assert record.largest_all_reduce < (1.1e6 if case.devices == 16 else 9e6)
    assert record.all_to_all == 0


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_memory_rises_by_the_secondary_shard():
    """2P/8 bytes of bf16, in place of the 2P/16 of which the other case gathers at each use; both
    carry a layer's gradients unsharded into the next iteration."""
    flat, near = (measure(case, compiled(case)) for case in (FLAT, NEAR))
    theory = 2 * flat.parameters * (1 / 8 - 1 / 16)
    assert near.temporary_bytes - flat.temporary_bytes == pytest.approx(theory, rel=0.15)
    # The shards live from the forward to the backward pass, and nothing else that is gathered.
    assert near.crossing_bytes == pytest.approx(2 * near.parameters / 8, rel=0.02)
    assert flat.crossing_bytes == 0
    assert set(near.gather_dtypes) == {"bf16"}
    assert near.argument_bytes == pytest.approx(flat.argument_bytes, rel=1e-3)
