"""Adapters train over a base in 4 bits, with the numbers of qwix under plain jit on one device."""

from typing import Any, cast

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from equal import zero_for
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from quantize.adapters import Sizes, adapters_of_llama, quantized
from tiers import rest_in_a_sweep

import zerojax
from zerojax.xla.jaxprs import nbytes

pytestmark = pytest.mark.usefixtures("quick_compile")

NF4 = {"weight_qtype": "nf4", "tile_size": 32}
RANK: Any = {"rank": 4, "alpha": 8.0}
WIDTH, LAYERS = 128, 3


def batches() -> list[Any]:
    random = np.random.default_rng(0)
    draw = lambda: random.normal(size=(16, WIDTH)).astype(np.float32)  # noqa: E731
    return [{"x": draw(), "y": draw()} for _ in range(3)]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        hidden = nn.relu(nn.Dense(2 * WIDTH, name="up")(x))
        return x + nn.Dense(WIDTH, name="down")(hidden) / 4, None


class Scanned(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        axes: Any = {"params": 0}
        scan = nn.scan(block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS)
        return cast(jax.Array, scan(name="layers")(x, None)[0])


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x, _ = Block(name=f"layer_{i}")(x)
        return x


class AdapterState(TrainState):
    base: Any


def linen(model: nn.Module, **quantization: Any) -> Any:
    provider = qwix.LoraProvider(module_path=".*/(up|down)", **RANK, **quantization)
    adapted: Any = qwix.apply_lora_to_model(model, provider)
    flat = flax.traverse_util.flatten_dict

    def create() -> AdapterState:
        params = flat(adapted.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"])
        lora = {name: x for name, x in params.items() if "_lora_" in name[-1]}
        base = {name: x for name, x in params.items() if name not in lora}
        parts = map(flax.traverse_util.unflatten_dict, (lora, base))
        fields = dict(zip(("params", "base"), parts, strict=True))
        return AdapterState.create(apply_fn=adapted.apply, tx=optax.sgd(0.1), **fields)

    def step(state: AdapterState, batch: Any) -> tuple[AdapterState, jax.Array]:
        def loss_fn(lora: Any) -> jax.Array:
            params = flax.traverse_util.unflatten_dict(flat(lora) | flat(state.base))
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return create, step


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x))) / 4


def of_nnx(**quantization: Any) -> Any:
    provider = qwix.LoraProvider(module_path="up|down", **RANK, **quantization)

    def create() -> Any:
        x = jnp.zeros((1, WIDTH))
        model: Any = qwix.apply_lora_to_model(Net(), provider, x, rngs=nnx.Rngs(1))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)

    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        def loss_fn(model: Any) -> jax.Array:
            return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

        of_lora = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss_fn, argnums=of_lora)(model)
        optimizer.update(model, grads)
        return cast(jax.Array, loss)

    return create, step


def own(returns_base: bool) -> Any:
    """Arrays, of which the base is dequantized as a stack before the loop over layers."""
    tx = optax.sgd(0.1)

    def create() -> Any:
        keys = jax.random.split(jax.random.key(0), 2)
        weights = {"w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 16}
        base = zerojax.quantize_weights(weights, "nf4", group_size=16)
        shapes = ((LAYERS, WIDTH, 4), (LAYERS, 4, WIDTH))
        low = [jax.random.normal(keys[1], shape) / 4 for shape in shapes]
        return low, tx.init(low), base

    def step(low: Any, opt_state: Any, base: Any, batch: Any) -> Any:
        def layer(x: jax.Array, each: Any) -> tuple[jax.Array, None]:
            w, (a, b) = each
            return x + jnp.tanh(x @ w + x @ a @ b), None

        def loss_fn(low: Any) -> jax.Array:
            stacks = zerojax.dequantize(base)["w"], low
            return jnp.mean((lax.scan(layer, batch["x"], stacks)[0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(low)
        updates, opt_state = tx.update(grads, opt_state)
        new = optax.apply_updates(low, updates), opt_state
        return (*new, base, loss) if returns_base else (*new, loss)

    return create, step


FORMS = {
    "scanned": (linen(Scanned(False), **NF4), {}),
    "scanned remat": (linen(Scanned(True), **NF4), {}),
    "unrolled": (linen(Unrolled(), **NF4), {}),
    "not quantized": (linen(Scanned(False)), {}),
    "NNX": (of_nnx(**NF4), {}),
    "own": (own(True), {}),
    "own, frozen": (own(False), {"frozen_argnums": 2}),
}


def losses(create: Any, step: Any, state: Any) -> list[float]:
    state, found = list(state) if isinstance(state, tuple) else [state], []
    for batch in batches():
        out = step(*state, batch)
        new, loss = (out[:-1], out[-1]) if isinstance(out, tuple) else ((), out)
        state[: len(new)] = new
        found.append(float(loss))
    return found


@pytest.mark.parametrize(
    ("form", "stage"),
    rest_in_a_sweep([("scanned remat", 3), ("unrolled", 3), ("NNX", 2), ("own, frozen", 3),
                     ("scanned", 3), ("scanned", 0), ("own", 3), ("not quantized", 3)], 4),
)  # fmt: skip
def test_losses_are_those_of_plain_jit(form: str, stage: int) -> None:
    (create, step), options = FORMS[form]
    plain = nnx.jit(step) if form == "NNX" else jax.jit(step)
    zero = zero_for(stage)
    found = losses(create, zero(step, **options), zero.init(create))
    np.testing.assert_allclose(found, losses(create, plain, create()), rtol=1e-6)


@pytest.mark.parametrize(
    "form",
    rest_in_a_sweep(["scanned remat", "unrolled", "own", "scanned", "NNX", "own, frozen"], 3),
)
def test_codes_travel_once_a_pass(form: str) -> None:
    """And nothing that was computed from them does. The first layer's input has no gradient, so
    that without a loop its first matrix is used in one pass alone."""
    (create, step), options = FORMS[form]
    zero = zero_for(3)
    state = zero.init(create)
    given = state if isinstance(state, tuple) else (state,)
    table = zero(step, **options).collectives(*given, batches()[0])
    codes = sum(x.size for x in jax.tree.leaves(state_of(state)) if x.dtype == jnp.uint4)
    sent = [x.bytes * x.times for x in table.rows if x.dtype == "uint4"]
    once = 0 if form in ("scanned", "scanned remat", "own", "own, frozen") else 2 * WIDTH**2
    assert sum(sent) == (2 * codes - once) // 2 * 7 // 8
    gathers = [x for x in table.rows if x.kind == "all-gather" and x.dtype != "uint4"]
    assert max(x.bytes for x in gathers) < 4 * WIDTH**2 * 7 // 8  # a square matrix in fp32


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize(("dtype", "expected"), [(None, 0.5625), (jnp.bfloat16, 0.53125)])
def test_a_device_holds_its_part_of_the_codes_and_scales_of_an_8b(
    dtype: Any, expected: float, devices: int
) -> None:
    sizes = Sizes(32, 4096, 14336, n_head=32, n_kv_head=8, vocab_size=128256)
    create, _ = adapters_of_llama(sizes, scan=True, remat=True, dtype=dtype)
    zero = zerojax.zero(stage=3, mesh=zerojax.mesh(devices))
    arrays = quantized(zero.abstract_state(create, jax.random.key(0)).base)
    shards = [
        jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
        for x in jax.tree.leaves(arrays)
    ]
    parameters = sum(x.qvalue.size for x in arrays)
    assert parameters == 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert sum(map(nbytes, shards)) == expected * parameters / devices


def state_of(state: Any) -> Any:
    is_nnx = isinstance(state, tuple) and isinstance(state[0], nnx.Module)
    return nnx.state(state[0]) if is_nnx else state
