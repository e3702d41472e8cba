"""On eight H100s the form of the state changes neither what a step sends nor what it holds."""

import functools

import pytest

from benchmarks.compiled import Cost, compile_program
from benchmarks.state_forms import FORMS, SMALL, program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]
sweep = functools.partial(pytest.param, marks=pytest.mark.sweep)
TRAIN_STATE, PAIR, DICT, HAIKU = FORMS


@functools.cache
def cost(form: str, stage: int, scan: bool = False, updates: int = 1) -> Cost:
    return compile_program(program(SMALL, form, scan=scan, updates=updates), stage, 8)


@pytest.mark.parametrize(
    ("form", "stage", "scan"),
    [
        (PAIR, 3, False), sweep(HAIKU, 1, False), sweep(DICT, 3, False),
        sweep(HAIKU, 3, False), sweep(PAIR, 2, False), sweep(PAIR, 3, True), sweep(PAIR, 1, True),
    ],
)  # fmt: skip
def test_as_a_train_state(form: str, stage: int, scan: bool) -> None:
    """The gradients of biases, too, are reduced where they are produced: until then XLA keeps the
    cotangents of all rows."""
    found, like = cost(form, stage, scan), cost(TRAIN_STATE, stage, scan)
    assert found.units == pytest.approx(like.units, rel=0.001)
    assert found.argument_bytes == pytest.approx(like.argument_bytes, abs=64)
    assert found.temporary_bytes < 1.01 * like.temporary_bytes


@pytest.mark.sweep
def test_a_loop_of_updates_holds_what_one_does() -> None:
    found, one = cost(PAIR, 3, updates=4), cost(TRAIN_STATE, 3)
    assert found.temporary_bytes < 1.1 * one.temporary_bytes
    for kind in ("all-gather", "reduce-scatter"):
        assert found.units[kind] <= 1.1 * 4 * one.units[kind]
