"""Experts on devices of their own, by an axis of the user's and constraints on the tokens."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.devices.rates import rates
from zerojax.foresight.costs import forecast

EXPERTS, LAYERS = 8, 2
P = PartitionSpec
SPECS = {"router": P(), "shared": P(), "into": P(None, "expert"), "back": P(None, "expert")}


def create(width: int, inner: int) -> TrainState:
    sizes = {
        "router": (width, EXPERTS), "shared": (width, width),
        "into": (EXPERTS, width, inner), "back": (EXPERTS, inner, width),
    }  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(sizes))
    shapes = zip(keys, sizes.items(), strict=True)
    params = {n: jax.random.normal(k, (LAYERS, *size)) * 0.1 for k, (n, size) in shapes}
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(apply_fn=lambda: None, params=params, tx=tx)


def train_step(state: Any, batch: Any, mesh: Any, choices: int, room: int) -> Any:
    """A step of rematerialized layers in a scan; constrains tokens on a mesh, not if it is None."""

    def constrain(x: Any, *specs: PartitionSpec) -> Any:
        for spec in specs if mesh is not None else ():
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        return x

    by_rows, by_experts = P(("data", "expert")), P("data", "expert")

    @jax.checkpoint
    def layer(x: Any, p: Any) -> Any:
        best, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), choices)
        one_hot = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)  # [B, T, K, E]
        in_order = one_hot.swapaxes(1, 2).reshape(len(x), -1, EXPERTS)
        place = ((jnp.cumsum(in_order, 1) - 1) * in_order).sum(-1).astype(int)
        place = place.reshape(len(x), choices, -1).swapaxes(1, 2)
        send = one_hot[..., None] * jax.nn.one_hot(place, room, dtype=x.dtype)[:, :, :, None]
        sent = jnp.einsum("btkec,btd->becd", send, x)
        sent = constrain(sent, by_rows, by_experts)
        hidden = jnp.tanh(jnp.einsum("becd,edf->becf", sent, p["into"]))
        done = jnp.einsum("becf,efd->becd", hidden, p["back"])
        done = constrain(done, by_experts, by_rows)
        y = jnp.einsum("btkec,btk,becd->btd", send, best.astype(x.dtype), done)
        return x + y + jnp.tanh(x @ p["shared"]), None

    def loss_fn(params: Any) -> Any:
        return jnp.mean((jax.lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("choices", "room", "k"), [(1, 8, 1), (2, 16, 2), (2, 2, 1)])
def test_numbers_are_those_of_plain_jit(choices: int, room: int, k: int) -> None:
    """One expert a token, two, and two with less room than tokens, which are dropped."""
    mesh = zerojax.mesh(axes={"data": 2, "expert": 4})
    zero = zerojax.zero(
        stage=3, mesh=mesh, specs=SPECS,
        gradient_accumulation_steps=k, stage3_param_persistence_threshold=0,
    )  # fmt: skip
    random = np.random.default_rng(0)
    batch = {n: random.normal(size=(16, 8, 16)).astype(np.float32) for n in "xy"}
    want = got = create(16, 32)
    split = zero(lambda state, batch: train_step(state, batch, mesh, choices, room))
    plain = jax.jit(lambda state, batch: train_step(state, batch, None, choices, room))
    for _ in range(2):
        got, loss = split(got, batch)
        want, expected = plain(want, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, x in want.params.items():
        np.testing.assert_allclose(got.params[name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_tokens_change_devices() -> None:
    """The all-to-alls send what the experts take, and no device computes more than its share."""
    width, inner, tokens, room = 512, 1024, 512, 128
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((32, tokens, width), jnp.bfloat16))
    forward, sent = [], Counter[str]()
    for axes, specs in (({"data": 8}, None), ({"data": 2, "expert": 4}, SPECS)):
        mesh = zerojax.topology("h100", 8, axes=axes)
        zero = zerojax.zero(stage=3, bf16=True, mesh=mesh, specs=specs)
        state = zero.abstract_state(lambda: create(width, inner))
        given = mesh if specs else None
        step = zero(lambda state, batch, m=given: train_step(state, batch, m, 1, room))
        found = forecast(step.programs(state, batch), zero.plan(state), rates("h100"))
        forward.append(sum(program.forward for program in found.programs))
        sent = Counter({kind: 0 for kind in sent})
        for each in found.traffic:
            sent[each.kind] += each.bytes
    assert forward[1] == pytest.approx(forward[0], rel=0.02)
    # Into the experts and back; in the forward pass, its repetition and the backward pass.
    taken = 2 * 4 * EXPERTS * room * width
    assert sent["all-to-all"] == 3 * 2 * LAYERS * taken * 3 // 4
    own = LAYERS * 2 * width * inner * EXPERTS // 4 + LAYERS * width * (width + EXPERTS)
    assert sent["all-gather"] == pytest.approx(2 * 2 * own / 2, rel=0.01)
