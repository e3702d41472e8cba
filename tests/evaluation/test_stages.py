"""Evaluations under pipeline stages: the numbers of plain jit, without a gather over stages."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from pipeline import models
from pipeline.models import batches
from pipeline.test_program import zero_on

pytestmark = pytest.mark.usefixtures("quick_compile")


def evaluate(state: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A mean over the batch, and a result of each row."""
    logits = state.apply_fn({"params": state.params}, tokens)
    logits = logits[0] if isinstance(logits, tuple) else logits
    return models.cross_entropy(logits, tokens), logits.argmax(-1)


def check(zero: Any, create: Any, rows: int) -> None:
    tokens, state = batches(rows, 1)[0], zero.init(create)
    loss, best = zero.evaluate(evaluate)(state, tokens)
    want, wanted = jax.jit(evaluate)(create(), tokens)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_array_equal(best, wanted)


@pytest.mark.parametrize(
    "rows",
    [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 21))],
    ids=["divided", "padded", "padded in micro-batches"],
)
def test_numbers_are_those_of_plain_jit(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    zero = zero_on(2, 2, 4, train_micro_batch_size_per_gpu=1)
    check(zero, lambda: models.stack(layers=2), rows)
    assert not caplog.records


@pytest.mark.slow
def test_layers_stay_on_their_stage() -> None:
    zero = zero_on(2, 2, 4, 3)
    state = zero.init(models.stack)
    (program,) = zero.evaluate(evaluate).programs(state, batches(8, 1)[0])
    text = program.lowered.compile().as_text()
    gathers = re.findall(r"= (\S+) all-gather", text)
    assert "collective-permute" in text
    assert not [shape for shape in gathers if re.match(r"\w+\[4,.*,", shape)], gathers
    check(zero, models.stack, 8)


@pytest.mark.slow
def test_layers_that_combine_rows_are_gathered(caplog: pytest.LogCaptureFixture) -> None:
    check(zero_on(2, 2, 4), lambda: models.stack("balanced", layers=2), 8)
    (warning,) = [x.getMessage() for x in caplog.records]
    assert re.search(r"the layers of all stages \(.* GB\) are gathered .* a layer", warning)
