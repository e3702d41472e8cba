"""Beam search: the targets of transformers' `generate`."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import recorded
from models.test_bart import CONFIGS, MASK, SOURCE, weights

from zerojax.generation.beam_search import beam_search, generate
from zerojax.models.bart import Bart

pytestmark = pytest.mark.usefixtures("quick_compile")


DEFAULT = {("blenderbot", 1), ("blenderbot", 2), ("bart", 4), ("bart", 6)}


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
    forced = options.pop("forced_eos_token_id", None) is not None
    config = dataclasses.replace(CONFIGS[name], scan=search != 2)
    variables = {"params": weights(name, config)}
    write = jax.jit(partial(generate, Bart(config), forced_end=forced, **options))
    targets, _ = write(variables, SOURCE, MASK)
    np.testing.assert_array_equal(targets, np.load(recorded.FILE)[f"{name}.search{search}"])


def likeliest(table: np.ndarray, longest: int, end: int, penalty: float) -> tuple[list[int], float]:
    """The best of all targets, of which a token's logits depend on the one before and the place."""
    best: tuple[list[int], float] = ([], -math.inf)

    def extend(tokens: list[int], score: float) -> None:
        nonlocal best
        if len(tokens) == longest or tokens[-1] == end:
            score /= (len(tokens) - 1) ** penalty
            best = max(best, (tokens, score), key=lambda each: each[1])
            return
        logits = table[len(tokens) - 1, tokens[-1]]
        for token, logit in enumerate(logits - np.log(np.exp(logits).sum())):
            extend([*tokens, token], score + logit)

    extend([1], 0.0)
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_enough_find_the_likeliest_of_all(penalty: float) -> None:
    rows, tokens, longest, beams, end, pad = 3, 4, 5, 27, 3, 0
    tables = np.random.default_rng(0).normal(0, 2, (rows, longest, tokens, tokens))

    def step(last: jax.Array, position: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(tables, jnp.float32)[cache, position, last], cache

    @jax.jit
    def write() -> tuple[jax.Array, jax.Array]:
        row = jnp.repeat(jnp.arange(rows), beams)
        return beam_search(
            *(step, row),
            rows=rows, start=1, end=end, pad=pad, num_beams=beams, max_length=longest,
            length_penalty=penalty, early_stopping="never",
        )  # fmt: skip

    for table, target, score in zip(tables, *write(), strict=True):
        best, expected = likeliest(table, longest, end, penalty)
        assert target.tolist() == best + [pad] * (longest - len(best))
        assert score == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams = 0 must be 1 or more"),
        ({"max_length": 1}, "max_length = 1 must be 2 or more"),
        ({"min_length": 21}, "min_length = 21 must be between 0 and max_length = 20"),
        ({"early_stopping": "always"}, "True, False or 'never', not 'always'"),
        ({"max_length": 25}, "max_length = 25, but the model has positions for 24"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    model = Bart(CONFIGS["bart"])
    variables = jax.eval_shape(model.init, jax.random.key(0), SOURCE, SOURCE)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(partial(generate, model, **options), variables, SOURCE)
