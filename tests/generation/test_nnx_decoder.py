"""Tokens of NNX decoders against their linen twin and complete rows."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from generation.test_generate import NEW, PROMPTS, gpt, params_of

import zerojax
from examples.nnx_gpt import GPT
from zerojax.models.gpt import SIZES, GPTConfig

pytestmark = pytest.mark.usefixtures("quick_compile")


def loaded(**fields: Any) -> GPT:
    """Returns the twin of `gpt(**fields)` with its parameters."""
    config = GPTConfig(**SIZES["tiny"] | fields)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(params=0)))
    nnx.update(model, params_of(gpt(**fields)))
    return model


@pytest.mark.slow
def test_the_gpt_generates_what_its_linen_twin_generates() -> None:
    model = loaded()
    before = jax.tree.structure(nnx.state(model))
    expected = zerojax.generate(gpt(), params_of(gpt()), PROMPTS, max_new_tokens=NEW)
    out = zerojax.generate(model, None, PROMPTS, max_new_tokens=NEW)
    np.testing.assert_array_equal(out, expected)
    assert jax.tree.structure(nnx.state(model)) == before
    state = jax.tree.map(lambda x: -x, nnx.state(model))
    negated = jax.tree.map(lambda x: -x, params_of(gpt()))
    np.testing.assert_array_equal(
        zerojax.generate(model, state, PROMPTS, max_new_tokens=NEW),
        zerojax.generate(gpt(), negated, PROMPTS, max_new_tokens=NEW),
    )


class OneByOne(nnx.Module):
    """A decoder by flax's convention: `decode=True` takes one token at a time."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(50, 16, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens))
        return self.embed.attend(nnx.gelu(self.dropout(x)))


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_a_decoder_by_flax_convention(beams: int) -> None:
    model, prompts = OneByOne(nnx.Rngs(0)), [[1, 2, 3, 4], [7, 8, 9, 1]]
    how: Any = dict(max_new_tokens=4, num_beams=beams)
    out = np.asarray(zerojax.generate(model, None, prompts, **how))
    assert not model.attention.decode
    assert model.attention.cached_key is None
    if beams > 1:
        assert out.shape == (2, 8)
        return
    model.eval()
    # Tokens after a position do not change its logits.
    best = nnx.jit(lambda model, rows: model(rows).argmax(-1))(model, out)
    np.testing.assert_array_equal(out[:, 4:], best[:, 3:-1])
    np.testing.assert_array_equal(out[:, :4], prompts)
