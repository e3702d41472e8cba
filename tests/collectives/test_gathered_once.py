"""Whole steps that transpose, round or widen their parameters: what they send and compute."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives
from zerojax.models.loss import loss_fn
from zerojax.plan import rule

WIDTH, WORDS, TOKENS = 512, 2032, 16
"""The table has fewer elements than a weight that stays sharded."""
STEPS = 3


def compiled_gathers(
    stage: int, accumulation: int = 1, *, scan: bool, casts: bool = False, head: Any = jnp.bfloat16
) -> dict[str, float]:
    """Returns what a step of a tied table and two layers gathers on 8 absent H100s, by dtype, in
    units of its parameters once in 2 bytes each.

    Args:
      casts: Whether the step casts its float32 parameters; otherwise the config does.
      head: The dtype of the layers and of the output.
    """
    zero = zerojax.zero(
        stage=stage, mesh=zerojax.topology("h100", 8), bf16=not casts,
        gradient_accumulation_steps=accumulation,
    )  # fmt: skip

    def create() -> TrainState:
        params = {"table": jnp.zeros((WORDS, WIDTH)), "layers": jnp.zeros((2, WIDTH, WIDTH))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w.astype(x.dtype)), None

    @zero
    def step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            x = params["table"].astype(jnp.bfloat16)[tokens].astype(head)
            if scan:
                x = jax.lax.scan(layer, x, params["layers"])[0]
            else:
                for i in range(2):
                    x = layer(x, params["layers"][i])[0]
            return loss_fn(x @ params["table"].astype(head).T, tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    tokens = jax.ShapeDtypeStruct((8 * accumulation, TOKENS), jnp.int32)
    text = step.lower(zero.abstract_state(create), tokens).compile().as_text()
    found: dict[str, float] = {}
    for each in collectives(text):
        if each.kind == "all-gather":
            for dtype, size in each.bytes_by_dtype.items():
                found[dtype] = found.get(dtype, 0) + each.times * size / (2 * PARAMETERS)
    return found


PARAMETERS = WORDS * WIDTH + 2 * WIDTH * WIDTH
LOOKED_UP = 8 * TOKENS * WIDTH / PARAMETERS
"""The rows that all devices look up in a micro-batch, gathered for the table's gradient."""


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
class TestCompiled:
    @pytest.mark.parametrize(("scan", "casts"), [(True, True), (False, False)])
    def test_stage_2_gathers_once_an_update(self, scan: bool, casts: bool) -> None:
        gathered = compiled_gathers(2, 8, scan=scan, casts=casts)
        assert gathered["bf16"] == pytest.approx(1 + 8 * LOOKED_UP, rel=0.05)
        assert gathered.get("f32", 0) < 0.01

    def test_a_float32_head_is_gathered_in_bf16(self) -> None:
        """Stage 3; the table, widened and transposed, is gathered for the output and for its
        backward pass."""
        gathered = compiled_gathers(3, scan=False, head=jnp.float32)
        assert gathered["bf16"] == pytest.approx(2 + LOOKED_UP, rel=0.05)
        assert "f32" not in gathered


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


def initial() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "table": (16, 32), "bias": (32,), "layers": (3, 32, 32), "block": (32, 32),
        "more": (2, 32, 32),
    }  # fmt: skip
    return {name: jnp.asarray(rng.normal(size=s) / 6) for name, s in shapes.items()}


class Network(nnx.Module):
    def __init__(self) -> None:
        for name, value in initial().items():
            setattr(self, name, nnx.Param(value))

    def __call__(self, x: jax.Array) -> jax.Array:
        return network({name: getattr(self, name)[...] for name in initial()}, x)


def linen_step(state: TrainState, x: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((network(params, x) - x) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def nnx_step(model: Network, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - x) ** 2))(model)
    optimizer.update(model, grads)
    return value


def batches() -> list[np.ndarray]:
    return [*np.random.default_rng(1).normal(size=(STEPS, 64, 16))]


def linen_run(wrap: Callable[..., Any], init: Callable[..., Any]) -> tuple[list[float], Any]:
    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=initial(), tx=optax.adamw(1e-2))

    state, step, losses = init(create), wrap(linen_step), []
    for x in batches():
        state, loss = step(state, x)
        losses.append(float(loss))
    return losses, jax.tree.leaves(state.params)


def nnx_run(wrap: Callable[..., Any], init: Callable[..., Any]) -> tuple[list[float], Any]:
    def create() -> tuple[Network, nnx.Optimizer]:
        model = Network()
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    model, optimizer = init(create)
    step = wrap(nnx_step)
    losses = [float(step(model, optimizer, x)) for x in batches()]
    return losses, jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.usefixtures("quick_compile", "in_float64")
@pytest.mark.parametrize(("flavour", "stage", "accumulation"), [("linen", 2, 4), ("nnx", 3, 1)])
def test_the_numbers_of_plain_jit(
    flavour: str, stage: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "SMALL", 32)
    run, jit = (linen_run, jax.jit) if flavour == "linen" else (nnx_run, nnx.jit)
    zero = zerojax.zero(
        stage=stage,
        stage3_param_persistence_threshold=0,
        gradient_accumulation_steps=accumulation,
    )
    losses, params = run(zero, zero.init)
    want_losses, want = run(jit, lambda create: create())
    np.testing.assert_allclose(losses, want_losses, rtol=1e-9)
    # Each micro-batch rounds its gradients to float32, as the cast's own transpose does.
    near = 1e-9 if accumulation == 1 else 1e-6
    for a, b in zip(params, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near)
