"""Steps with the schedule 1F1B against plain jit on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipeline import models
from pipeline.models import batches
from pipeline.test_program import check, zero_on

import zerojax


def one_f_one_b(
    stages: int, data: int, micro_batches: int, stage: int = 1, **keywords: Any
) -> zerojax.Zero:
    keywords |= {"pipeline_schedule": "1f1b"}
    return zero_on(stages, data, micro_batches, stage, **keywords)


@pytest.mark.parametrize(
    ("stages", "data", "micro_batches", "stage"),
    [
        (2, 2, 4, 1),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in [(2, 1, 8, 0), (4, 2, 8, 1), (4, 1, 4, 2), (2, 2, 8, 3), (4, 1, 16, 1)]
        ),
    ],
)
def test_numbers_are_those_of_plain_jit(
    stages: int, data: int, micro_batches: int, stage: int
) -> None:
    check(one_f_one_b(stages, data, micro_batches, stage), lambda: models.stack(remat=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "dropout", "experts"])
def test_layers_that_keep_values_with_dropout_and_with_further_losses(kind: str) -> None:
    check(one_f_one_b(4, 2, 8), lambda: models.stack(kind))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
def test_models_of_zerojax(model: str) -> None:
    create = getattr(models, f"{model}_state")
    check(one_f_one_b(2, 2, 8), create, steps=10, dtype="float32")
