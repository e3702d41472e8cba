"""State beside the parameters on eight H100s: held and sent as parameters are."""

import dataclasses
import functools

import pytest

from benchmarks.compiled import Cost, compile_program, table
from benchmarks.extra_state import SMALL, programs

LORA, NNX, GAN, *_ = programs(SMALL)  # DPO: test_held_or_moved.py
gpu_compile = [pytest.mark.gpu_compile, pytest.mark.usefixtures("require_gpu_compiler")]
sweep = functools.partial(pytest.param, marks=pytest.mark.sweep)


@functools.cache
def cost(name: str) -> Cost:
    program = next(each for each in programs(SMALL) if each.name == name)
    return compile_program(program, 3, 8)


class TestCompiled:
    pytestmark = gpu_compile

    @pytest.mark.parametrize("name", [LORA.name, sweep(NNX.name)])
    def test_a_frozen_base_is_gathered_for_each_pass(self, name: str) -> None:
        found = cost(name)
        updates, batch = 12 * SMALL.layers * 2 * 8 * 5 * SMALL.width, 4 * 2 * 128 * SMALL.width
        held = 4 * found.arrays / 8 + updates + batch
        assert found.argument_bytes == pytest.approx(held, rel=0.02)
        # The first product's input has no cotangent.
        assert found.units["all-gather"] == pytest.approx(2 - 1 / (2 * SMALL.layers), rel=0.01)
        assert found.units.get("reduce-scatter", 0) < 0.05
        assert found.units.get("all-to-all", 0) == 0

    def test_a_second_networks_gradient_is_reduce_scattered(self) -> None:
        """Twice: the critic sees real rows and made ones; and the generator's once."""
        found = cost(GAN.name)
        generator, first = 1.5, 0.5  # in critics, whose heads have one output; a layer
        batch = 4 * 2 * 128 * SMALL.width
        assert found.units.get("all-reduce", 0) < 0.02
        assert found.units["reduce-scatter"] == pytest.approx(2 + generator, rel=0.01)
        assert found.units["all-gather"] == pytest.approx(6 + 3 * (generator - first), rel=0.01)
        held = 12 * (1 + generator) * found.arrays / 8 + batch
        assert found.argument_bytes == pytest.approx(held, rel=0.05)


def test_the_table_says_what_was_measured() -> None:
    three = Cost(
        name="GAN",
        stage=3,
        devices=8,
        arrays=50_000_000,
        units={"all-gather": 1.7, "reduce-scatter": 1.0},
        moved_bytes=0,
        argument_bytes=2_500_000_000,
        temporary_bytes=1_000_000,
        seconds=12.4,
    )
    head, row, plain = table([three, dataclasses.replace(three, stage=None)])
    assert dict(zip(head, row, strict=True)) == {
        "program": "GAN",
        "": "stage 3",
        "devices": "8",
        "network M": "50",
        "all-gathers": "1.70",
        "reduce-scatters": "1.00",
        "all-reduces": "0.00",
        "all-to-alls": "0.00",
        "arguments MB": "2,500",
        "temporaries MB": "1",
        "seconds": "12",
    }
    assert plain[1] == "plain jit"
