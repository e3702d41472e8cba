"""Workloads by name: the numbers of plain jit at stages 0 and 3, and the article's batches."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import zerojax
from zerojax.tuning.tasks import classification, seq2seq
from zerojax.tuning.workload import Workload

pytestmark = pytest.mark.usefixtures("quick_compile")

TASKS = {
    "classification": partial(classification, "deberta-tiny"),
    "seq2seq": partial(seq2seq, "blenderbot-tiny"),
}
KEY = jax.random.key(0)


def drawn(made: Workload) -> dict[str, np.ndarray]:
    """A batch in which rows end early and are filled up with zeros."""
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(1, 90, leaf.shape) for name, leaf in made.batch.items()}
    for name in set(batch) - {"attention_mask"}:
        if batch[name].ndim == 2:
            lengths = rng.integers(2, batch[name].shape[1] + 1, (len(batch[name]), 1))
            batch[name] *= np.arange(batch[name].shape[1]) < lengths
        else:
            batch[name] %= 2
    batch["attention_mask"] = (batch["input_ids"] != 0).astype(np.int64)
    return {name: leaf.astype(np.int32) for name, leaf in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "stage"),
    [("classification", 0), ("seq2seq", 3)],
)
def test_a_step_is_that_of_plain_jit(task: str, stage: int) -> None:
    def made_for(stage: int) -> tuple[Any, Workload]:
        sgd = {"type": "SGD", "params": {"lr": 0.5}}
        zero = zerojax.zero(stage=stage, optimizer=sgd, stage3_param_persistence_threshold=0)
        return zero, TASKS[task](zero, rows=8, seq=16)

    _, made = made_for(0)
    start, batch = jax.jit(made.create_state)(KEY), drawn(made)
    state, metrics = jax.jit(made.train_step)(start, batch, KEY)
    zero, made = made_for(stage)
    sharded, found = zero(made.train_step)(start, batch, KEY)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-6)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), sharded.params, state.params
    )
    whole = [leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(sharded.params)]
    assert all(whole) if stage == 0 else sum(whole) <= 1  # two classes do not divide
