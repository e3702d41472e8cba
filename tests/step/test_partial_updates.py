"""Gradients and updates of a part of the parameters: plain jit's numbers."""

from collections.abc import Callable
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, host, zero_for
from flax import linen as nn
from flax import nnx
from flax.linen import fp8_ops
from flax.training.train_state import TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, WIDTH = 32, 16
BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)), strict=True))
SINGLE = jax.tree.map(lambda x: x.astype(np.float32), BATCH)
STAGES = (0, 1, 2, 3)


def exactly(
    create: Callable[[], Any], step: Callable[..., Any], stage: int, k: int = 1, **how: Any
) -> None:
    source = emitted.Source(create, step, (SINGLE,), **how)
    emitted.check(source, stage, k, small_array_size=0)


class Quantized(nn.Module):
    """Flax's FP8 layers, which keep scales and maxima beside their parameters."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        direct = fp8_ops.Fp8DirectDotGeneralOp
        x = jnp.tanh(nn.Dense(32, dot_general_cls=direct)(x))
        return nn.Dense(WIDTH, dot_general_cls=direct)(x)


def fp8_state() -> TrainState:
    model = Quantized()
    variables = model.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    return TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-2))


def fp8_step(state: TrainState, batch: Any) -> Any:
    """As flax documents it: gradients of all variables."""

    def loss_of(variables: Any) -> jax.Array:
        return jnp.mean((state.apply_fn(variables, batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.parametrize("stage", STAGES)
def test_fp8_layers(stage: int) -> None:
    exactly(fp8_state, fp8_step, stage)


@pytest.mark.slow
def test_fp8_layers_are_scaled() -> None:
    """Scales and maxima are overwritten, not updated by the optimizer."""
    step, plain = zero_for(3)(fp8_step), jax.jit(fp8_step)
    state, want = fp8_state(), fp8_state()
    for _ in range(3):
        (state, _), (want, _) = step(state, SINGLE), plain(want, SINGLE)
    assert_near(host(state.params), host(want.params), TOLERANCE["float32"])
    scales = state.params[fp8_ops.OVERWRITE_WITH_GRADIENT]
    assert any((x != 1).any() for x in jax.tree.leaves(scales) if x.size == 1)


class Network(nnx.Module):
    """A base and a head; which of them is trained is a filter's affair."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.base = nnx.Linear(WIDTH, 32, param_dtype=float, rngs=rngs)
        self.head = nnx.Linear(32, WIDTH, param_dtype=float, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(jnp.tanh(self.base(x)))


TRAINED = nnx.All(nnx.Param, nnx.PathContains("head"))


def nnx_loss(model: Network, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def in_place(model: Network, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
    grad_of = nnx.value_and_grad(nnx_loss, argnums=nnx.DiffState(0, TRAINED))
    loss, grads = grad_of(model, batch)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("stage", STAGES)
def test_an_nnx_optimizer_of_a_filter(stage: int) -> None:
    def create() -> Any:
        model = Network(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=TRAINED)

    exactly(create, in_place, stage, call=emitted.in_arguments)


def two_layers() -> dict[str, dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "base": {"w": jax.random.normal(keys[0], (WIDTH, 32)) / 4},
        "head": {"v": jax.random.normal(keys[1], (32, WIDTH)) / 6, "b": jnp.zeros(WIDTH)},
    }


TX = optax.adam(1e-2)


def head_state() -> TrainState:
    params = two_layers()
    return TrainState(
        step=0, apply_fn=None, params=params, tx=TX, opt_state=TX.init(params["head"])
    )


def head_step(state: TrainState, batch: Any) -> Any:
    """One layer is trained, of which the optimizer has the state."""

    def loss_of(head: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ state.params["base"]["w"])
        return jnp.mean((hidden @ head["v"] + head["b"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params["head"])
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params["head"])
    params = {**state.params, "head": optax.apply_updates(state.params["head"], updates)}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


@pytest.mark.parametrize(("stage", "k"), [(3, 1), (3, 4), (2, 4), (2, 1), (1, 1), (0, 1)])
def test_one_layer_of_several(stage: int, k: int) -> None:
    exactly(head_state, head_step, stage, k)


def test_a_layer_with_masters() -> None:
    """The step computes in bfloat16; the layer's masters, and the base, are kept in float32."""
    step, plain = zero_for(3, bf16=True)(head_step), jax.jit(head_step)
    state, want = head_state(), head_state()
    for _ in range(3):
        (state, _), (want, _) = step(state, SINGLE), plain(want, SINGLE)
    got, expected = host(state.params), host(want.params)
    assert_near(got["base"], expected["base"], 0)
    assert_near(got["head"], expected["head"], 2.0**-6)
    assert (got["head"]["v"] != got["head"]["v"].astype(jnp.bfloat16)).any()


def filtered(state: TrainState, batch: Any) -> Any:
    """What is trained is no subtree."""

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["head"]["v"].T) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    some = {"head": {"v": grads["head"]["v"]}}
    updates, opt_state = state.tx.update(some, state.opt_state, some)
    head = {**state.params["head"], "v": state.params["head"]["v"] + updates["head"]["v"]}
    params = {**state.params, "head": head}
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


def filtered_state() -> TrainState:
    params = two_layers()
    tree = {"head": {"v": params["head"]["v"]}}
    return TrainState(step=0, apply_fn=None, params=params, tx=TX, opt_state=TX.init(tree))


@pytest.mark.parametrize(
    ("step", "create", "options", "words"),
    [
        (
            filtered,
            filtered_state,
            {"bf16": True},
            "updates only some parameters.*Under bf16",
        ),
        (
            head_step,
            head_state,
            {"offload_optimizer": {"device": "cpu"}},
            "gradients of another structure than state.params.*train without offload",
        ),
    ],
)
def test_what_needs_all_parameters_is_refused(
    step: Any, create: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(NotImplementedError, match=words):
        zero_for(3, **options)(step)(create(), SINGLE)
