"""How often gradients are reduced under accumulation, on the GPU compile."""

import pytest

from benchmarks.measure import Case, compile_case

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

GPT = Case(
    stage=1, scan=True, n_layer=4, n_embd=1024, n_head=16, vocab_size=4096, block_size=512,
    micro_batch=2, accumulate=4,
)  # fmt: skip


def test_what_is_sent_is_the_theory() -> None:
    found = compile_case(GPT)
    vectors = 1.2e6  # their gradients are all-reduced in each group
    for kind, expected in found.expected_moved_bytes.items():
        assert found.moved_bytes[kind] == pytest.approx(expected, rel=0.05, abs=vectors), kind
    assert found.largest_all_reduce <= 1e6
