"""Many small parameters: collectives and Python work do not grow with their number."""

import sys
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from benchmarks.leaves import ROWS, WIDTH, at, compiled, counts, creating, step
from zerojax.foresight.traffic import collectives, moved_by_kind


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_few_collectives_on_gpus() -> None:
    """One gather and one reduce-scatter, of the theory's bytes, and the norm."""
    leaves = 200
    text = compiled(at(3, zerojax.topology("h100", 8)), leaves)
    found = counts(text)
    assert found["all-gather"] == found["reduce-scatter"] == 1
    assert sum(found.values()) <= 4
    once = leaves * WIDTH * 4 * 7 // 8
    moved = moved_by_kind(collectives(text))
    assert moved["all-gather"] == moved["reduce-scatter"] == once


@pytest.mark.usefixtures("quick_compile")
def test_a_call_does_no_python_work_for_a_leaf() -> None:
    """As many Python functions are called for 6 leaves as for 30, once the step is compiled."""
    assert calls(6) == calls(30)


def calls(leaves: int) -> int:
    zero = zerojax.zero(stage=1)
    state: Any = zero.init(creating(leaves), jax.random.key(0))
    decorated, x = zero(step), np.ones((ROWS, WIDTH), "f4")
    for _ in range(3):
        state, _ = decorated(state, x)
    names: list[str] = []

    def seen(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "gc_callback" not in frame.f_code.co_name:
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        decorated(state, x)
    finally:
        sys.setprofile(before)
    return len(names)
