"""Generation in two processes that share a state: the rows of one process, in both."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from generation.test_generate import NEW, PROMPTS, create, gpt, params_of, seq2seq

import zerojax
from zerojax.distributed.launched import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile", "quick_processes")]

DRAWN: dict[str, Any] = dict(max_new_tokens=NEW, temperature=1.0)
SOURCES = 4 * [[5, 6, 7, 8, 9], [11]]
SEARCHED: dict[str, Any] = dict(tokens=SOURCES, max_new_tokens=NEW, num_beams=2)


def written(process: int) -> dict[str, Any]:
    model, zero = gpt(n_layer=1), zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    state = zero.init(functools.partial(create, model))
    how = DRAWN | dict(tokens=2 * PROMPTS, key=jax.random.key(0))
    found: dict[str, Any] = {
        "rows": np.asarray(zerojax.generate(model, state, **how)),
        "steps": [*zerojax.generate_stream(model, state, **how)],
    }
    translator, params = seq2seq("t5")

    def translating() -> TrainState:
        return TrainState.create(apply_fn=translator.apply, params=params, tx=optax.sgd(0.1))

    targets = zerojax.generate(translator, zero.init(translating), **SEARCHED)
    found["targets"] = np.asarray(targets)
    for name, own in {
        "tokens": dict(tokens=[[1], [2 + process]]),
        "key": dict(key=jax.random.key(process)),
        "options": dict(temperature=1.0 + process),
    }.items():
        try:
            zerojax.generate(model, state, **how | own)
        except LaunchError as error:
            found[name] = str(error)
    return found


def test_rows_are_those_of_one_process(in_processes: Callable[..., list[Any]]) -> None:
    one, other = in_processes(2, written)
    model = gpt(n_layer=1)
    how = DRAWN | dict(key=jax.random.key(0))
    expected = zerojax.generate(model, params_of(model), 2 * PROMPTS, **how)
    translator, params = seq2seq("t5")
    targets = zerojax.generate(translator, params, **SEARCHED)
    for found in (one, other):
        np.testing.assert_array_equal(found["rows"], expected)
        np.testing.assert_array_equal(found["targets"], targets)
        for i, prompt in enumerate(2 * PROMPTS):
            steps = [step[i] for step in found["steps"]]
            np.testing.assert_array_equal(expected[i, len(prompt) :][:NEW], steps)
    for name in ("tokens", "key", "options"):
        assert one[name] == other[name]
        assert f"zerojax.generate: {name} differs between the processes" in one[name]
        assert "Pass all prompts in every process" in one[name]
