"""Beam search: the targets of transformers' `generate`."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from models import recorded
from models.test_bart import CONFIGS, MASK, SOURCE, weights

from zerojax.generation.beam_search import generate
from zerojax.models.bart import Bart

pytestmark = pytest.mark.usefixtures("quick_compile")


DEFAULT = {("blenderbot", 1), ("blenderbot", 2), ("bart", 3), ("bart", 4)}


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "search"),
    [
        pytest.param(name, i, marks=[] if (name, i) in DEFAULT else pytest.mark.sweep)
        for name in CONFIGS
        for i in range(len(recorded.SEARCHES))
    ],
)
def test_targets_are_transformers(name: str, search: int) -> None:
    options = dict(recorded.SEARCHES[search])
    forced = options.pop("forced_eos_token_id", None)
    config = dataclasses.replace(CONFIGS[name], scan=search != 2)
    variables = {"params": weights(name, config)}
    write = jax.jit(partial(generate, Bart(config), forced_eos=forced, **options))
    targets, _ = write(variables, SOURCE, MASK)
    np.testing.assert_array_equal(targets, np.load(recorded.FILE)[f"{name}.search{search}"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams = 0 must be 1 or more"),
        ({"max_length": 1}, "max_length = 1 must be 2 or more"),
        ({"min_length": 21}, "min_length = 21 must be between 0 and max_length = 20"),
        ({"early_stopping": "always"}, "'always' must be True, False or 'never'"),
        ({"max_length": 25}, "max_length = 25 must be at most 24"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    model = Bart(CONFIGS["bart"])
    variables = jax.eval_shape(model.init, jax.random.key(0), SOURCE, SOURCE)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(generate, model, **options), variables, SOURCE)
