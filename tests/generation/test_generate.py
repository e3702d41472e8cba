"""Generated tokens against the model's largest logits without a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax
from zerojax.models.bart import SIZES as BART_SIZES
from zerojax.models.bart import Bart, BartConfig
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.gpt import SIZES as GPT_SIZES
from zerojax.models.llama import SIZES as LLAMA_SIZES
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.t5 import SIZES as T5_SIZES
from zerojax.models.t5 import T5, T5Config
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("quick_compile")

PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 8, 200], [3, 4]]
NEW = 6


def gpt(**fields: Any) -> GPT:
    return GPT(GPTConfig(**GPT_SIZES["tiny"] | fields))


def llama(tensor: TensorParallel | None = None, **fields: Any) -> Llama:
    return Llama(LlamaConfig(**LLAMA_SIZES["llama-tiny"] | fields), tensor=tensor)


def params_of(model: nn.Module) -> Any:
    return jax.tree.map(jnp.asarray, drawn(model))


@functools.cache
def drawn(model: nn.Module) -> Any:
    """Returns parameters of numpy, large enough that tokens do not repeat."""
    draw = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 8), int))["params"]
    return jax.tree.map(
        lambda x: np.asarray(draw.normal(0, 0.1, x.shape) + (x.ndim == 1), x.dtype), shapes
    )


def create(model: nn.Module) -> TrainState:
    return TrainState.create(apply_fn=model.apply, params=params_of(model), tx=optax.sgd(0.1))


LONGEST = 12
"""Tokens of a complete row: those after its end do not change the logits before."""


@functools.cache
def following(model: nn.Module) -> Any:
    """Returns a function of parameters, a row and its length, whose result is the next token."""

    @jax.jit
    def following(params: Any, row: jax.Array, length: int) -> jax.Array:
        return model.apply({"params": params}, row[None])[0, length - 1].argmax()

    return following


def without_cache(
    model: nn.Module, prompt: list[int], new: int = NEW, params: Any = None, longest: int = LONGEST
) -> list[int]:
    """Returns a prompt and the tokens after it, from the logits of complete rows."""
    params = params_of(model) if params is None else params
    row, end = np.zeros(longest, int), len(prompt) + new
    row[: len(prompt)] = prompt
    for length in range(len(prompt), end):
        row[length] = following(model)(params, row, length)
    return row[:end].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        gpt(),
        gpt(scan=True),
        llama(sliding_window=4, layer_types=("sliding_attention", "full_attention"), scan=True),
        llama(
            rope_type="longrope", original_size=6, short_factor=(1.0,) * 4, long_factor=(3.0,) * 4
        ),
    ],
    ids=["gpt", "gpt-scanned", "llama-windows", "llama-longrope"],
)
def test_each_token_is_the_largest_logit(model: nn.Module) -> None:
    prompts = PROMPTS[:2] if model.config.__class__ is GPTConfig else PROMPTS[:1]
    longrope = getattr(model.config, "rope_type", "") == "longrope"
    new = 1 if longrope else NEW  # keys before position 6 keep their rotation, as in transformers
    out = np.asarray(zerojax.generate(model, params_of(model), prompts, max_new_tokens=new))
    for row, prompt in zip(out, prompts, strict=True):
        longest = len(prompt) + new if longrope else LONGEST  # which decides the rotation
        expected = without_cache(model, prompt, new, longest=longest)
        assert row[: len(expected)].tolist() == expected
        assert (row[len(expected) :] == 0).all()


@pytest.mark.slow
def test_rows_end_at_eos_and_streams_agree() -> None:
    model = gpt()
    plain = np.asarray(zerojax.generate(model, params_of(model), PROMPTS, max_new_tokens=NEW))
    eos = int(plain[0, 7])  # the third new token of the first row
    how: Any = dict(max_new_tokens=NEW, eos=[255, eos], pad=254)
    out = np.asarray(zerojax.generate(model, params_of(model), PROMPTS, **how))
    steps = np.stack([*zerojax.generate_stream(model, params_of(model), PROMPTS, **how)], axis=1)
    for i, prompt in enumerate(PROMPTS):
        expected = plain[i, len(prompt) : len(prompt) + NEW].tolist()
        if eos in expected:
            expected = expected[: expected.index(eos) + 1]
        end = len(prompt) + len(expected)
        assert out[i, len(prompt) : end].tolist() == expected
        assert (out[i, end:] == 254).all()
        assert steps[i, : len(expected)].tolist() == expected
        assert (steps[i, len(expected) :] == 254).all()


def test_padded_prompts_are_rows_without_padding() -> None:
    model = gpt()
    tokens = jnp.array([[0, 0, 9], [7, 8, 200]])
    left = zerojax.generate(
        model, params_of(model), tokens, mask=[[0, 0, 1], [1, 1, 1]], max_new_tokens=2
    )
    rows = zerojax.generate(model, params_of(model), [[9], [7, 8, 200]], max_new_tokens=2)
    assert (left == rows).all()


def buffers(state: TrainState) -> list[int]:
    """Returns where the arrays of a state lie."""
    shards = [s.data for x in jax.tree.leaves(state.params) for s in x.addressable_shards]
    return [x.unsafe_buffer_pointer() for x in shards]


@functools.cache
def on_one_device(**sizes: Any) -> np.ndarray:
    """Returns the tokens of a scanned llama after 8 prompts."""
    model = llama(scan=True, **sizes)
    how: Any = dict(max_new_tokens=NEW)
    return np.asarray(zerojax.generate(model, params_of(model), 2 * PROMPTS, **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keywords", "weights", "rows"),
    # Each state, and each of both ways with rows that the devices divide and with others.
    [
        (dict(stage=0), "gathered", 3),
        (dict(stage=1), "by_layer", 8),
        (dict(stage=3), "gathered", 8),
        (dict(stage=3), "by_layer", 3),
        (dict(stage=3, offload_param="cpu", offload_optimizer="cpu"), "by_layer", 8),
    ],
    ids=str,
)
def test_states_generate_what_one_device_generates(keywords: Any, weights: Any, rows: int) -> None:
    model = llama(scan=True)
    zero = zerojax.zero(stage3_param_persistence_threshold=0, **keywords)
    state = zero.init(functools.partial(create, model))
    how: Any = dict(max_new_tokens=NEW, weights=weights)
    before = buffers(state)
    tokens = zerojax.generate(model, state, (2 * PROMPTS)[:rows], **how)
    assert buffers(state) == before
    np.testing.assert_array_equal(tokens, on_one_device()[:rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "weights", "rows"),
    [(2, "gathered", 4), (4, "by_layer", 1)],
)
def test_sharded_heads_generate_what_one_device_generates(
    devices: int, weights: Any, rows: int
) -> None:
    sizes: Any = dict(n_head=4, n_kv_head=4)
    mesh = zerojax.mesh(axes={"data": 8 // devices, "model": devices})
    model = llama(TensorParallel(mesh), scan=True, **sizes)
    zero = zerojax.zero(
        stage=3, mesh=mesh, specs=model.tensor.specs, stage3_param_persistence_threshold=0
    )
    state = zero.init(functools.partial(create, model))
    how: Any = dict(max_new_tokens=NEW, weights=weights)
    tokens = zerojax.generate(model, state, PROMPTS[:rows], **how)
    np.testing.assert_array_equal(tokens, on_one_device(**sizes)[:rows])


class OneByOne(nn.Module):
    """A decoder by flax's convention: a field `decode`, and one token at a time."""

    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(50, 16, embedding_init=nn.initializers.normal(1.0))
        x = embed(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, decode=self.decode)(x, mask=mask)
        return embed.attend(nn.gelu(nn.Dense(16)(x)))


@pytest.mark.slow
def test_a_decoder_by_flax_convention() -> None:
    model, prompts = OneByOne(), [[1, 2, 3, 4], [9], [7, 8]]
    params = model.init(jax.random.key(0), jnp.ones((1, 4), int))["params"]
    out = np.asarray(zerojax.generate(model, params, prompts, max_new_tokens=4))
    for row, prompt in zip(out, prompts, strict=True):
        expected = without_cache(model, prompt, 4, params)
        assert row[: len(expected)].tolist() == expected


def seq2seq(name: str, **fields: Any) -> Any:
    """Returns a T5 or a BART, with parameters large enough that tokens vary."""
    model: Any = T5(T5Config(**T5_SIZES["t5-tiny"] | fields))
    if name == "bart":
        model = Bart(BartConfig(**BART_SIZES["blenderbot-tiny"] | fields))
    ones, draw = jnp.ones((1, 3), int), np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ones, ones)["params"]
    return model, jax.tree.map(
        lambda x: jnp.asarray(draw.normal(0, 0.4, x.shape) + (x.ndim == 1), x.dtype), shapes
    )


def test_nan_logits_are_an_error() -> None:
    model = gpt()
    params = jax.tree.map(lambda x: x, params_of(model))
    params["ln_f"] = {**params["ln_f"], "bias": params["ln_f"]["bias"] * jnp.nan}
    with pytest.raises(FloatingPointError, match=r"row 0 after its first 3 tokens contain NaN"):
        zerojax.generate(model, params, [[1, 2, 3]], max_new_tokens=2)


@pytest.mark.slow
def test_streams_have_no_beams() -> None:
    with pytest.raises(ValueError, match="pass num_beams=1"):
        zerojax.generate_stream(gpt(), params_of(gpt()), [[1]], max_new_tokens=2, num_beams=2)
    one_by_one = OneByOne()
    params = jax.eval_shape(one_by_one.init, jax.random.key(0), jnp.ones((1, 4), int))["params"]
    params = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), params)
    with pytest.raises(ValueError, match="num_beams: the model reads one token of all rows"):
        zerojax.generate(one_by_one, params, [[1], [2, 3]], max_new_tokens=2, num_beams=2)
