"""Wrong arguments: an error that names them, before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.errors import ScopeParamNotFoundError, ScopeParamShapeError
from generation.test_generate import create, gpt, params_of

import zerojax
from examples import nnx_gpt as example
from zerojax.generation.prompts import Prompts
from zerojax.models.gpt import SIZES, GPTConfig

pytestmark = pytest.mark.usefixtures("quick_compile")

DRAW: dict[str, Any] = dict(temperature=1.0, key=jax.random.key(0))


class NoCache(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Embed(8, 8)(tokens)


def nnx_gpt(**fields: Any) -> example.GPT:
    """Returns an abstract model."""
    config = GPTConfig(**SIZES["tiny"] | fields)
    return nnx.eval_shape(lambda: example.GPT(config, rngs=nnx.Rngs(params=0)))


def of_nnx(**fields: Any) -> dict[str, Any]:
    """Returns a model, and the variables of one with other fields."""
    model = nnx_gpt()
    nnx.update(model, params_of(gpt()))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.state(nnx_gpt(**fields)))
    return dict(model=model, params=zeros)


def deleted(params: Any) -> Any:
    params["ln_f"]["bias"].delete()
    return params


Bad = tuple[Any, type[Exception], str]

PARAMS: list[Bad] = [
    (dict(params=None), TypeError, "params: none, not parameters of GPT. Pass"),
    (dict(params=[1, 2]), TypeError, "params: a list, not parameters of"),
    (
        lambda: dict(params=create(gpt()).replace(params=None)),
        TypeError,
        "params: none in the TrainState",
    ),
    (
        lambda: dict(params=jax.eval_shape(lambda: params_of(gpt()))),
        TypeError,
        r"params\['h_0'\]\['attn'\].* without values: pass arrays",
    ),
    (
        lambda: dict(params=zerojax.zero(stage=3).abstract_state(lambda: create(gpt()))),
        TypeError,
        "without values: pass arrays",
    ),
    (lambda: dict(params=params_of(gpt(scan=True))), ScopeParamNotFoundError, 'named "scale" in'),
    (lambda: dict(params=params_of(gpt(n_embd=64))), ScopeParamShapeError, r"shape \(256, 32\)"),
    (
        lambda: dict(params=deleted(params_of(gpt()))),
        ValueError,
        r"'bias'\] is deleted .donated to a step",
    ),
    (lambda: of_nnx() | dict(params=[1]), TypeError, "params: a list: pass None, or nnx.state of"),
    (lambda: of_nnx() | dict(params={}), ValueError, "is not there, and in the model"),
    (lambda: of_nnx(n_embd=64), ValueError, r"is \(192,\), and in the model \(96,\)"),
    (lambda: of_nnx(n_layer=1), ValueError, r"params\['h_1'\].* is not there"),
    (lambda: of_nnx(n_layer=3), ValueError, r"params\['h_2'\].* and in the model not there"),
    (lambda: dict(model=nnx_gpt(), params=None), TypeError, "without values"),
    (dict(model=NoCache()), TypeError, "keeps no keys and values"),
]
TOKENS: list[Bad] = [
    (dict(tokens=[[1] * 30], max_new_tokens=5), ValueError, "positions for 32"),
    (dict(tokens=[[1, 256]]), ValueError, "token 256 at position 1 of row 0"),
    (dict(tokens=[[1], []]), ValueError, "the prompt of row 1 is empty"),
    (dict(tokens=[]), ValueError, "no row"),
    (dict(tokens=None), TypeError, "tokens: a NoneType: pass int"),
    (dict(tokens=np.ones((2, 3))), TypeError, "dtype float64: pass int"),
    (dict(tokens=[1, 2, 3]), TypeError, r"row 0 of tokens has shape \(\)"),
    (dict(tokens=[[1, 2]], mask=[[1]]), ValueError, "row 0 of mask does not fit the 2"),
    (dict(tokens=[[1], [2]], mask=[[1]]), ValueError, "mask has 1 rows, and tokens 2"),
    (dict(tokens=[[1, 2]], mask=[[-1e9, 0]]), ValueError, "row 0 of mask .* pass 1 or 0"),
    (dict(tokens=[[1, 2]], mask=[[0, 0]]), ValueError, "the prompt of row 0 is empty"),
]
OPTIONS: list[Bad] = [
    (dict(max_new_tokens=0), ValueError, "max_new_tokens = 0"),
    (dict(max_new_tokens=2.5), TypeError, "max_new_tokens = 2.5 must be an integer"),
    (dict(temperature=1.0), ValueError, r"pass key=jax.random.key"),
    (dict(temperature=-1.0), ValueError, "temperature = -1.0"),
    (dict(temperature=1.0, key=0), TypeError, "key = 0: pass one key"),
    (dict(top_k=5), ValueError, "need a temperature"),
    (DRAW | dict(top_k=0), ValueError, "top_k = 0"),
    (DRAW | dict(top_p=0), ValueError, "top_p = 0.0"),
    (dict(eos=256), ValueError, "eos = 256 must be one of"),
    (dict(pad=256), ValueError, "pad = 256 must be one of"),
    (dict(dtype=jnp.int8), ValueError, "dtype = int8 must be floating"),
    (dict(dtype=jnp.float8_e4m3fn), ValueError, "dtype = float8_e4m3fn must be .* of 16 bits"),
    (dict(dtype="half a byte"), ValueError, "dtype = 'half a byte' must be floating"),
    (dict(num_beams=0), ValueError, "num_beams = 0"),
    (dict(num_beams=10**6), ValueError, "num_beams = 1000000: the model has only 256 tokens"),
    (DRAW | dict(num_beams=2), ValueError, "num_beams = 2 beside temperature"),
    (dict(length_penalty=2.0), ValueError, "need num_beams of 2 or more"),
    (dict(num_beams=2, length_penalty="1"), ValueError, "length_penalty = '1' must be a finite"),
    (dict(num_beams=2, early_stopping="soon"), ValueError, "'soon' must be True, False or 'never'"),
    (dict(weights="here"), ValueError, 'must be "gathered", "by_layer" or None'),
]


CASES = [*PARAMS, *TOKENS, *OPTIONS]


@pytest.mark.parametrize(("how", "error", "message"), CASES, ids=[case[2] for case in CASES])
def test_bad_input(how: Any, error: type[Exception], message: str, compiles: list[str]) -> None:
    given = dict(model=gpt(), params=params_of(gpt()), tokens=[[1]], max_new_tokens=2)
    given |= how() if callable(how) else how
    compiles.clear()
    with pytest.raises(error, match=message):
        zerojax.generate(**given)
    assert not compiles


@pytest.mark.parametrize("what", ["params", "tokens", "key"])
def test_calls_inside_jit_are_an_error(what: str) -> None:
    given: Any = dict(params=params_of(gpt()), tokens=jnp.ones((1, 2), int), max_new_tokens=2)

    def call(x: Any) -> Any:
        return zerojax.generate(gpt(), **given | DRAW | {what: x})

    with pytest.raises(TypeError, match=rf"generate: {what}.* is traced: .*; call it outside jit"):
        jax.eval_shape(call, (given | DRAW)[what])


def test_calls_of_equal_shapes_share_programs(compiles: list[str]) -> None:
    """Prompts are padded differently, or a little longer; options are numbers of NumPy and JAX."""
    params, tokens = params_of(gpt()), np.array([[0, 5, 6], [7, 8, 9]])
    how: Any = dict(max_new_tokens=2, top_k=300, top_p=1.0, eos=3, **DRAW)
    zerojax.generate(gpt(), params, tokens, mask=[[0, 1, 1], [1, 1, 1]], **how)
    compiles.clear()
    how |= dict(max_new_tokens=np.int64(2), temperature=jnp.float32(1), top_k=np.int32(300))
    how |= dict(top_p=np.float32(1), eos=np.array([3]))
    out = zerojax.generate(gpt(), params, tokens, mask=[[0, 0, 1], [0, 1, 1]], **how)
    longer = zerojax.generate(gpt(), params, [[5, 6, 7, 8], [9]], **how | dict(max_new_tokens=7))
    assert not compiles
    assert (out.shape, longer.shape) == ((2, 5), (2, 11))
    assert np.asarray(out)[:, :2].tolist() == [[6, int(out[0, 1])], [8, 9]]


@pytest.mark.parametrize(
    ("token", "dtype"), [(2**32 + 5, np.int64), (2**63, np.uint64), (-(2**40), np.int64)]
)
def test_a_token_that_no_int32_holds_is_not_read_as_another(token: int, dtype: Any) -> None:
    with pytest.raises(ValueError, match=rf"token {token} at position 1 of row 0 is not among"):
        Prompts.of(np.array([[3, token]], dtype), None)
    assert Prompts.of(np.array([[3, token]], dtype), [[1, 0]]).tokens.tolist() == [[3, 0]]
