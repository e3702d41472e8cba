"""Generation in two processes that share a state: the rows of one process, in both."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from generation.test_generate import NEW, PROMPTS, create, gpt, params_of

import zerojax
from zerojax.distributed.launched import LaunchError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compile", "quick_processes")]

DRAWN: dict[str, Any] = dict(max_new_tokens=NEW, temperature=1.0)


def written(process: int) -> dict[str, Any]:
    model, zero = gpt(n_layer=1), zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    state = zero.init(functools.partial(create, model))
    how = DRAWN | dict(tokens=2 * PROMPTS, key=jax.random.key(0))
    found: dict[str, Any] = {"rows": np.asarray(zerojax.generate(model, state, **how))}
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
    np.testing.assert_array_equal(one["rows"], expected)
    np.testing.assert_array_equal(other["rows"], expected)
    for name in ("tokens", "key", "options"):
        assert one[name] == other[name]
        assert f"zerojax.generate: {name} differs between the processes" in one[name]
        assert "generate takes the prompts of all processes" in one[name]
