"""What recurrent models send, asserted on what the benchmark prints; and that all models run."""

import dataclasses

import pytest

from benchmarks.architecture_models import Sizes, architectures
from benchmarks.architectures import DEVICES, STAGES, WITHIN, missed, sent, table
from benchmarks.compiled import Cost, Program, compile_program, lower_program

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


def test_the_table_says_what_was_measured_beside_the_theory() -> None:
    three = Cost(
        name="LSTM, 2 layers",
        stage=3,
        devices=DEVICES,
        arrays=50_000_000,
        units={"all-gather": 1.7, "reduce-scatter": 1.0, "collective-permute": 0.25},
        moved_bytes=236_250_000,
        argument_bytes=2_000_000_000,
        temporary_bytes=500_000_000,
        seconds=12.4,
    )
    head, row = table([three])
    assert dict(zip(head, row, strict=True)) == {
        "architecture": "LSTM, 2 layers",
        "": "stage 3",
        "parameters M": "50",
        "gathers": "1.70 (2)",
        "scatters": "1.00 (1)",
        "all-reduces": "0.00",
        "all-to-alls": "0.00",
        "other": "0.25",
        "sent / theory": "0.90",
        "peak MB": "2,500",
        "seconds": "12",
    }
    assert missed([three]) == []
    more = dataclasses.replace(three, moved_bytes=315_000_000)
    assert missed([more]) == ["LSTM, 2 layers, stage 3: sends 1.20 of the theory, limit 1.1"]
    plain = dataclasses.replace(more, stage=None)
    assert table([plain])[1][1:5] == ["plain jit", "50", "1.70", "1.00"]
    assert missed([plain]) == []  # no limit for what is not ours
    assert None in STAGES
