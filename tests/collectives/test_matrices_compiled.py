"""What XLA:GPU compiles of an optimizer that computes with matrices: the collectives and about the
memory of AdamW, and one all-to-all each way for each group of equal matrices."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.hlo.traffic import collectives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

DEVICES, WIDTH, LAYERS = 8, 512, 8


def parameters() -> dict[str, jax.Array]:
    square, up = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 2 * WIDTH)
    return {name: jnp.zeros(shape) for name, shape in (("in", square), ("out", square), ("up", up))}


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(x @ w["in"]) @ w["out"]
        return x + jnp.tanh(x @ w["up"])[:, :WIDTH], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


class Compiled(NamedTuple):
    """Bytes that a device sends, by kind; the number of all-to-alls; the peak of its memory."""

    sent: collections.Counter[str]
    exchanges: int
    peak: int


def compiled(optimizer: str) -> Compiled:
    zero = zerojax.zero(
        stage=3,
        bf16=True,
        mesh=zerojax.topology("h100", DEVICES),
        optimizer={"type": optimizer, "params": {"lr": 1e-3}},
        stage3_param_persistence_threshold=0,
    )

    @zero
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=parameters(), tx=zero.optimizer())

    batch = jax.ShapeDtypeStruct((DEVICES * 8, WIDTH), jnp.float32)
    program = train_step.lower(jax.eval_shape(create), batch).compile()
    sent = collections.Counter[str]()
    found = [each for each in collectives(program.as_text()) if each.group_size > 1]
    for each in found:
        sent[each.kind] += each.moved_bytes
    memory = program.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(sent, sum(each.kind == "all-to-all" for each in found), peak)


def test_muon_sends_what_adamw_sends_and_its_momentum_there_and_back() -> None:
    adam, muon = compiled("AdamW"), compiled("Muon")
    own_shares = 2 * sum(x.size for x in parameters().values()) // DEVICES  # bytes in bf16
    assert muon.sent.pop("all-to-all") == 2 * own_shares * (DEVICES - 1) // DEVICES
    assert muon.sent == adam.sent
    assert muon.exchanges == 4  # two shapes, each there and back
    assert muon.peak < 1.15 * adam.peak
