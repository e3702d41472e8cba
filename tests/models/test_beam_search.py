"""Beam search: the targets of transformers' `generate`."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import recorded
from models.test_bart import CONFIGS, MASK, SOURCE, weights

from zerojax.models.bart import Bart
from zerojax.models.beam_search import beam_search, generate

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("search", range(len(recorded.SEARCHES)))
@pytest.mark.parametrize("name", CONFIGS)
def test_targets_are_transformers(name: str, search: int) -> None:
    options = dict(recorded.SEARCHES[search])
    forced = options.pop("forced_eos_token_id", None) is not None
    config = dataclasses.replace(CONFIGS[name], scan=search % 2 == 0)
    variables = {"params": weights(name, config)}
    write = jax.jit(partial(generate, Bart(config), forced_end=forced, **options))
    targets, scores = write(variables, SOURCE, MASK)
    np.testing.assert_array_equal(targets, np.load(recorded.FILE)[f"{name}.search{search}"])
