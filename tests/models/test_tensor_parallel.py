"""GPT and Llama cut over a mesh axis compute what they compute on one device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.models.blocks import grouped_attention
from zerojax.models.deberta import SIZES, DebertaClassifier, DebertaConfig
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.kernels import Kernels
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.models.tensor_parallel import TensorParallel

pytestmark = pytest.mark.usefixtures("quick_compile")

# On 4 x 2 a GPT's table is larger than what is looked up in it, so that the table stays cut.
VOCABULARY, TOKENS, ROWS, STEPS = 256, 16, 16, 3
KEY = jax.random.key(0)
MESHES = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "2x2x2": {"replica": 2, "data": 2, "model": 2},
}


def gpt(**options: Any) -> GPTConfig:
    sizes = {"vocab_size": VOCABULARY, "block_size": TOKENS, "n_layer": 2, "n_head": 4}
    return GPTConfig(n_embd=16, **sizes, **options)


def llama(**options: Any) -> LlamaConfig:
    """Of two query heads to one of keys."""
    sizes = {"vocab_size": VOCABULARY, "block_size": TOKENS, "n_layer": 2, "n_head": 8}
    return LlamaConfig(n_embd=32, n_inner=48, n_kv_head=4, **sizes, **options)


CONFIGS: dict[str, GPTConfig | LlamaConfig] = {
    "gpt": gpt(scan=True, remat=True),
    "llama": llama(scan=True, remat=True),
}


def create_for(model: Any, dtype: Any) -> Callable[[jax.Array], TrainState]:
    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((1, 7), jnp.int32))["params"]
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))

    return create


def train_step(state: TrainState, tokens: jax.Array, key: jax.Array) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        options: Any = {"targets": tokens[:, 1:], "deterministic": False, "rngs": rngs}
        losses: jax.Array = state.apply_fn({"params": params}, tokens[:, :-1], **options)
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def followed(step: Callable[..., Any], state: Any, first: int = 0) -> tuple[list[float], Any]:
    """Losses, and the state after them."""
    losses, rng = [], np.random.default_rng(0)
    batches = rng.integers(VOCABULARY, size=(STEPS, ROWS, TOKENS + 1), dtype=np.int32)
    for batch in batches[first:]:
        state, loss = step(state, batch, KEY)
        losses.append(float(loss))
    return losses, state


def model_of(config: Any, **options: Any) -> Any:
    return (GPT if isinstance(config, GPTConfig) else Llama)(config, **options)


@functools.cache
def plain(name: str) -> tuple[list[float], Any]:
    with jax.enable_x64(True):
        create = create_for(model_of(CONFIGS[name]), jnp.float64)
        losses, state = followed(jax.jit(train_step), jax.jit(create)(KEY))
        return losses, jax.device_get(state.params)


def zero_on(mesh: str, stage: int = 3, **options: Any) -> tuple[zerojax.Zero, Any]:
    tensor = TensorParallel(zerojax.mesh(axes=MESHES[mesh]))
    options = {"stage3_param_persistence_threshold": 0, **options}
    return zerojax.zero(stage=stage, mesh=tensor.mesh, specs=tensor.specs, **options), tensor


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "stage", "accumulation"),
    [
        ("gpt", "4x2", 3, 1),
        ("llama", "2x4", 3, 2),
    ],
)
def test_computes_what_one_device_does(name: str, mesh: str, stage: int, accumulation: int) -> None:
    with jax.enable_x64(True):
        zero, tensor = zero_on(mesh, stage, gradient_accumulation_steps=accumulation)
        # As a kernel runs, each device on its own heads; and what XLA makes of the model's.
        heads = zero.per_device(grouped_attention, sharded=tensor.sharded_heads)
        own = {"attention": heads} if name == "llama" else {}
        model = model_of(CONFIGS[name], tensor=tensor, **own)
        state = zero.init(create_for(model, jnp.float64), KEY)
        losses, state = followed(zero(train_step), state)
        want_losses, want = plain(name)
        np.testing.assert_allclose(losses, want_losses, rtol=1e-9)
        assert_close(state.params, want)


def test_the_plan() -> None:
    """Columns, rows, heads and the vocabulary are cut, and ZeRO takes what is left."""
    zero, tensor = zero_on("4x2")
    create = create_for(Llama(llama(scan=True), tensor=tensor), jnp.float32)
    params = zero.plan(zero.abstract_state(create, KEY)).params
    block = params["layers"]
    assert params["embed_tokens"]["embedding"] == P("model", "data")
    assert params["lm_head"]["kernel"] == P("data", "model")
    assert block["self_attn"]["q_proj"]["kernel"] == P(None, "data", "model")
    assert block["self_attn"]["o_proj"]["kernel"] == P(None, "model", "data")
    assert block["mlp"]["up_proj"]["kernel"] == P(None, "data", "model")
    assert block["mlp"]["down_proj"]["kernel"] == P(None, "model", "data")
    assert block["input_layernorm"]["scale"] == P(None, "data")


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (gpt(), {"n_head": 5, "n_embd": 20}),
        (gpt(), {"vocab_size": 65}),
        (llama(), {"n_kv_head": 2, "n_head": 4}),
        (llama(), {"n_inner": 50}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_sizes_that_do_not_divide(config: Any, size: dict[str, int]) -> None:
    name, value = next(iter(size.items()))
    name = {"n_kv_head": "kv_heads"}.get(name, name)
    _, tensor = zero_on("2x4")
    says = f"{name} = {value} does not divide among the 4 devices of the mesh axis 'model': make it"
    with pytest.raises(ValueError, match=says):
        model_of(dataclasses.replace(config, **size), tensor=tensor)


def test_what_else_is_refused() -> None:
    zero, tensor = zero_on("2x4")
    with pytest.raises(ValueError, match=r"n_head = 4 does not divide .* or change the axis"):
        GPT(gpt(), tensor=TensorParallel(zerojax.mesh(axes={"data": 1, "model": 8})))
    model = Llama(llama(), tensor=tensor)
    params = jax.eval_shape(create_for(model, jnp.float32), KEY).params
    with pytest.raises(ValueError, match=r"7 tokens in a row do not divide .* to 4 or 8"):
        jax.eval_shape(model.apply, {"params": params}, jnp.zeros((8, 7), jnp.int32))
    with pytest.raises(ValueError, match="the fused layers do not support tensor parallelism"):
        GPT(gpt(), Kernels(zero.per_device), tensor=tensor)
    other = DebertaClassifier(DebertaConfig(**SIZES["deberta-tiny"]))
    with pytest.raises(ValueError, match=r"tensor parallelism knows no module .* zerojax.zero"):
        zero.abstract_state(create_for(other, jnp.float32), KEY)
    for axes, axis in (({"data": 8}, "model"), ({"data": 4, "model": 2}, "data")):
        with pytest.raises(ValueError, match=f"needs an axis '{axis}' beside the batch's"):
            TensorParallel(zerojax.mesh(axes=axes), axis)
    assert TensorParallel.of(zerojax.mesh()) is None
