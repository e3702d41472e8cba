"""What a model cut over an axis sends: Megatron's collectives, and ZeRO's."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.tensor_parallel import GATHERS, SCATTERS, Case, along, compiled

CASE = Case(size="llama-7b", data=4, model=2, micro=2, seq=2048, changes={"n_layer": 8})


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_collectives_are_megatrons_and_zeros() -> None:
    sent = compiled(CASE)
    assert (sent.gathers, sent.scatters) == sent.counted == (8 * GATHERS + 2, 8 * SCATTERS + 1)
    # Beside the blocks' activations: head and table, and two numbers a token of the loss.
    activation = 2 * 2 * 2048 * 4096 // 2
    assert sent.beside == pytest.approx(5 * activation, rel=0.01)
    assert sent.largest < sent.logits / 1.5  # no logits are gathered
    # A lookup sends rows of the table, not the table.
    assert 0.9 < sent.of_theory < 1.05
    assert sent.state == pytest.approx(12 * sent.parameters / 8, rel=0.01)


@pytest.mark.parametrize(
    ("group", "axis"), [((2, 3), "model"), ((0, 2, 4, 6), "data"), (tuple(range(8)), "both")]
)
def test_axes_of_groups(group: tuple[int, ...], axis: str) -> None:
    each: Any = SimpleNamespace(groups=(group,))
    assert along(each, CASE) == axis
