"""How often gradients are reduced under accumulation, on the GPU compile."""

from dataclasses import replace

import pytest

from benchmarks.measure import Case, compile_case

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]

GPT = Case(
    stage=1, scan=True, n_layer=4, n_embd=1024, n_head=16, vocab_size=4096, block_size=512,
    micro_batch=2, accumulate=4,
)  # fmt: skip
GROUPS = {"devices": 16, "replicas": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(changes, marks=pytest.mark.sweep)
            for changes in (
                {"micro_batch": 1},
                {"stage": 0},
                {"scan": False},
                {"precision": "fp16"},
                {**GROUPS},
                {**GROUPS, "stage": 2},
            )
        ),
    ],
    ids=str,
)
def test_what_is_sent_is_the_theory(changes: dict[str, object]) -> None:
    found = compile_case(replace(GPT, **changes))
    vectors = 1.2e6  # their gradients are all-reduced in each group
    for kind, expected in found.expected_moved_bytes.items():
        assert found.moved_bytes[kind] == pytest.approx(expected, rel=0.05, abs=vectors), kind
    if found.case.stage > 0:
        assert found.largest_all_reduce <= 1e6
