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


def assert_passes(case: Case, passes: int) -> None:
    """Checks what is sent between hosts, in passes over all parameters."""
    found = compiled(case)
    sent = between_hosts(found.executable.as_text())
    once = expected_between(replace(case, partition=1), found.parameters) / 3 / case.accumulate
    assert expected_between(case, found.parameters) == pytest.approx(passes * once, rel=1e-6)
    # The tied table is two parameters to a step: one to look up in and one to multiply with. Where
    # it is gathered once, its gradient as a lookup changes places after the sum.
    tables = 2 * case.accumulate * case.vocab_size * case.n_embd / once
    assert sum(sent.values()) / once == pytest.approx(passes + tables, rel=0.01)
    assert sent["reduce-scatter"] / once > 0.95 * case.accumulate


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_traffic_between_hosts_falls_to_2_passes() -> None:
    near = replace(NEAR, scan=False, n_layer=2, vocab_size=1024)
    assert_passes(near, 2)
    record = measure(near, compiled(near))
    assert record.total_moved_bytes < 1.09 * record.total_expected_moved_bytes
    assert record.largest_all_reduce < 1.1e6
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
