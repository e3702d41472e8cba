"""Whole steps that transpose, round or widen their parameters: what they send and compute."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from swept import swept

import zerojax
from zerojax.collectives import in_place
from zerojax.hlo.traffic import collectives
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.loss import loss_fn

WIDTH, LAYERS, WORDS, TOKENS = 512, 2, 4096, 16
STEPS = 3


gpu_compile = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]


class TestCompiled:
    """For 8 absent H100s; a unit is the parameters once in 2 bytes each."""

    pytestmark = gpu_compile

    @pytest.mark.parametrize(
        ("scan", "module_casts", "accumulation"),
        [
            (True, True, 8),
            (False, False, 8),
            pytest.param(False, True, 1, marks=pytest.mark.sweep),
            pytest.param(True, True, 1, marks=pytest.mark.sweep),
            pytest.param(False, True, 8, marks=pytest.mark.sweep),
            pytest.param(True, False, 8, marks=pytest.mark.sweep),
        ],
    )
    def test_stage_2_gathers_once_an_update(
        self, scan: bool, module_casts: bool, accumulation: int
    ) -> None:
        """A tied GPT in bf16, by the config or by its modules' ``dtype`` over float32 parameters.
        The rows looked up are gathered for the table's gradient, once a micro-batch."""
        gathered = gathers_of_gpt(2, scan, module_casts, accumulation)
        size = TOKENS * 8 * WIDTH / parameters(scan)
        assert gathered["bf16"] == pytest.approx(1 + accumulation * size, rel=0.05)
        assert gathered.get("f32", 0) < 0.01  # the small ones together

    @pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.sweep)])
    def test_a_float32_head_is_gathered_in_bf16(
        self, scan: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stage 3; the table, widened and transposed, is gathered for the output and for its
        backward pass; of the lookup the rows are, for the table's gradient."""
        monkeypatch.setattr(in_place, "LEAST", 10**12)  # few rows would leave the table sharded
        gathered = gathers_of_head(scan)
        assert gathered["bf16"] == pytest.approx(HEAD_UNITS, rel=0.05)
        assert "f32" not in gathered


HEAD_UNITS = (2 * WORDS + 2 * 2 * WIDTH) / (WORDS + 2 * WIDTH) + 8 * TOKENS / (WORDS + 2 * WIDTH)


def units(lowered: Any, parameters: int) -> dict[str, float]:
    """What is gathered, by dtype."""
    found: dict[str, float] = {}
    for each in collectives(lowered.compile().as_text()):
        if each.kind == "all-gather":
            for dtype, size in each.bytes_by_dtype.items():
                found[dtype] = found.get(dtype, 0) + each.times * size / (2 * parameters)
    return found


@functools.cache
def gpt(scan: bool, dtype: Any) -> GPT:
    config = GPTConfig(
        vocab_size=WORDS, block_size=TOKENS, n_layer=LAYERS if scan else 1, n_head=8,
        n_embd=WIDTH, remat=True, scan=scan, dtype=dtype,
    )  # fmt: skip
    return GPT(config)


def create_gpt(scan: bool, dtype: Any = None) -> Callable[..., TrainState]:
    def create(key: jax.Array) -> TrainState:
        params = gpt(scan, dtype).init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    return create


def parameters(scan: bool) -> int:
    shapes = jax.eval_shape(create_gpt(scan), jax.random.key(0)).params
    return sum(x.size for x in jax.tree.leaves(shapes))


def gathers_of_gpt(
    stage: int, scan: bool, module_casts: bool, accumulation: int
) -> dict[str, float]:
    zero = zerojax.zero(
        stage=stage,
        mesh=zerojax.topology("h100", 8),
        bf16=not module_casts,
        gradient_accumulation_steps=accumulation,
    )
    dtype = jnp.bfloat16 if module_casts else None

    @zero
    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = gpt(scan, dtype).apply({"params": params}, tokens[:, :-1])
            return loss_fn(logits, tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state = zero.abstract_state(create_gpt(scan, dtype), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((8 * accumulation, TOKENS + 1), jnp.int32)
    return units(step.lower(state, tokens), parameters(scan))


def gathers_of_head(scan: bool) -> dict[str, float]:
    zero = zerojax.zero(stage=3, mesh=zerojax.topology("h100", 8), bf16=True)

    def create(key: jax.Array) -> TrainState:
        params = {"table": jnp.zeros((WORDS, WIDTH)), "layers": jnp.zeros((2, WIDTH, WIDTH))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(x.dtype)), None

    @zero
    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["table"][tokens].astype(jnp.float32)
            if scan:
                x = jax.lax.scan(layer, x, params["layers"])[0]
            else:
                for i in range(2):
                    x = layer(x, params["layers"][i])[0]
            logits = x @ params["table"].astype(jnp.float32).T
            return loss_fn(logits, tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state = zero.abstract_state(create, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((8, TOKENS), jnp.int32)
    return units(step.lower(state, tokens), WORDS * WIDTH + 2 * WIDTH * WIDTH)


def narrow(w: jax.Array) -> jax.Array:
    """A parameter in the next smaller dtype."""
    return w.astype({"float64": "float32", "float32": "bfloat16"}.get(str(w.dtype), w.dtype))


def network(params: Any, x: jax.Array) -> jax.Array:
    """[rows, 16] -> [rows, 16]; work in the dtype of ``x`` with rounded parameters."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ narrow(w).astype(x.dtype).T), None

    x = x @ narrow(params["table"]).astype(x.dtype) + params["bias"].astype(x.dtype)
    x = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, params["layers"])[0]
    x = jax.checkpoint(lambda x, w: jnp.tanh(x @ narrow(w).astype(x.dtype)))(x, params["block"])
    x = jax.lax.scan(layer, x, params["more"])[0]
    return x @ narrow(params["table"]).astype(x.dtype).T


def initial(dtype: Any) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "table": (16, 32), "bias": (32,), "layers": (3, 32, 32), "block": (32, 32),
        "more": (2, 32, 32),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(size=s) / 6, dtype) for name, s in shapes.items()}


class Network(nnx.Module):
    def __init__(self, dtype: Any) -> None:
        for name, value in initial(dtype).items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, x: jax.Array) -> jax.Array:
        return network({name: getattr(self, name)[...] for name in initial(x.dtype)}, x)


def linen_step(state: TrainState, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        out = network(params, x.astype(params["table"].dtype))
        return jnp.mean((out - x.astype(out.dtype)).astype(x.dtype) ** 2)

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def nnx_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def batches(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=(64, 16)).astype(dtype) for _ in range(STEPS)]


def linen_run(
    wrap: Callable[..., Any], init: Callable[..., Any], dtype: str
) -> tuple[list[float], Any]:
    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=initial(dtype), tx=optax.adamw(1e-2))

    state, step, losses = init(create), wrap(linen_step), []
    for x in batches(dtype):
        state, loss = step(state, x)
        losses.append(float(loss))
    return losses, jax.tree.leaves(state.params)


def nnx_run(
    wrap: Callable[..., Any], init: Callable[..., Any], dtype: str
) -> tuple[list[float], Any]:
    def create() -> tuple[Network, nnx.Optimizer]:
        model = Network(dtype)
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    model, optimizer = init(create)
    step = wrap(nnx_step)
    losses = [float(step(model, optimizer, x)) for x in batches(dtype)]
    return losses, jax.tree.leaves(nnx.state(model, nnx.Param))


def zero_for(stage: int, accumulation: int, **more: Any) -> zerojax.Zero:
    return zerojax.zero(
        stage=stage,
        stage3_param_persistence_threshold=0,
        gradient_accumulation_steps=accumulation,
        **more,
    )


@pytest.mark.usefixtures("quick_compile", "in_float64")
@pytest.mark.parametrize(
    ("flavour", "stage", "accumulation"),
    swept(product(["linen", "nnx"], [2, 1, 3], [4, 1, 8])),
)
def test_the_numbers_of_plain_jit(flavour: str, stage: int, accumulation: int) -> None:
    run, jit = (linen_run, jax.jit) if flavour == "linen" else (nnx_run, nnx.jit)
    zero = zero_for(stage, accumulation, small_array_size=32)
    losses, params = run(zero, zero.init, "float64")
    want_losses, want = run(jit, lambda create: create(), "float64")
    np.testing.assert_allclose(losses, want_losses, rtol=1e-9)
    # Each micro-batch rounds its gradients to float32, as the cast's own transpose does.
    near = 1e-9 if accumulation == 1 else 1e-6
    for a, b in zip(params, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulation"), swept(product([3, 2], [4, 1])))
def test_with_a_loss_scale(stage: int, accumulation: int) -> None:
    """fp16 as without ZeRO, to rounding."""
    zero, alone = (zero_for(s, accumulation, fp16=True, small_array_size=32) for s in (stage, 0))
    losses, _ = linen_run(zero, zero.init, "float32")
    want, _ = linen_run(alone, alone.init, "float32")
    np.testing.assert_allclose(losses, want, rtol=5e-3)
