"""What recurrent models send, asserted on what the benchmark prints; and that all models run."""

import pytest

from benchmarks.architecture_models import Sizes, architectures
from benchmarks.architectures import DEVICES, WITHIN, missed, sent
from benchmarks.compiled import Program, compile_program, lower_program

TINY = Sizes(
    layers=2,
    width=512,
    vocabulary=2048,
    tokens=32,
    image=64,
    expert_width=512,
    steps=64,
    convolutions=(1, 1),
    rows=1,
    recurrent_rows=2,
    image_rows=1,
)
ALL = architectures(TINY)
LSTM = ALL[-1]
gpu_compile = [
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]


class TestCompiled:
    pytestmark = gpu_compile

    @pytest.mark.parametrize("architecture", ALL, ids=lambda each: each.name)
    def test_every_architecture_lowers(self, architecture: Program) -> None:
        """Plain jit's step is the same but for a cast: one will do."""
        stages: tuple[int | None, ...] = (3, None) if architecture is LSTM else (3,)
        for stage in stages:
            _, parameters = lower_program(architecture, stage, DEVICES)
            assert parameters > 500_000

    def test_an_lstm_sends_what_theory_asks_for(self) -> None:
        stage = 3
        found = compile_program(LSTM, stage, DEVICES)
        assert sent(found) < WITHIN
        assert found.units["all-gather"] < 1.1 * (stage - 1)
        assert found.units["reduce-scatter"] < 1.1
        assert found.units["all-reduce"] < 0.02
        assert missed([found]) == []
