"""An unrolled model gathers as it goes: on the GPU compile, and with the numbers of plain jit."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from collectives import unrolled
from emitted import check_step
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from swept import swept

import zerojax
from benchmarks.lifetimes import peak_gathered_bytes
from zerojax.collectives import Inserter, Shard, window
from zerojax.collectives.window import Window
from zerojax.devices.mesh import zero_axis
from zerojax.hlo.traffic import collectives

WIDTH, LAYERS, DEVICES = 4096, 4, 64
LAYER = 2 * 8 * WIDTH**2  # bytes of its matrices in bf16


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_no_more_than_two_layers_are_gathered_at_once() -> None:
    """On 64 GPUs the gathers of a layer take longer than its products: XLA would gather all layers
    first."""
    zero = zerojax.zero(stage=3, bf16=True, mesh=zerojax.topology("h100", DEVICES))
    program: Any = unrolled.lowered(zero, WIDTH, LAYERS, rows=512 * DEVICES).compile()
    text = program.as_text()
    assert peak_gathered_bytes(text) <= 2 * LAYER
    sent = collections.Counter[str]()
    for each in collectives(text):
        sent[each.kind] += each.moved_bytes
    once = LAYERS * LAYER * (DEVICES - 1) // DEVICES
    assert sent.pop("all-reduce") <= 1e6
    assert sent == {"all-gather": 2 * once, "reduce-scatter": once}


@pytest.mark.parametrize(
    "axes",
    swept([{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "seq": 4}, {"data": 1, "seq": 8}]),
)
@pytest.mark.usefixtures("quick_compile")
def test_the_numbers_of_plain_jit(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "AHEAD", 20_000)  # so that these matrices wait for each other
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.normal(size=(96, 96)) / 10 for i in range(4)}
    rows = (16, 8, 96) if "seq" in axes else (16, 96)
    batch = {"x": rng.normal(size=rows), "y": rng.normal(size=rows)}

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
        def loss(p: dict[str, jax.Array]) -> jax.Array:
            x = batch["x"]
            for i in range(4):
                x = jnp.tanh(x @ p[f"w{i}"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def start() -> TrainState:
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    with jax.enable_x64(True):
        mesh = zerojax.mesh(axes=axes)
        zero = zerojax.zero(stage=3, mesh=mesh, stage3_param_persistence_threshold=0)
        lowered = zero(step).lower(start(), batch).as_text()
    assert ("bitcast_convert" in lowered) == (Window.of(mesh, zero_axis(mesh)) is not None)
    check_step(zero, step, start, batch)


@pytest.mark.parametrize("rows", [16, 3])
def test_products_in_a_while_loop_wait(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each iteration gathers anew; rows that the devices do not divide are waited for as well."""
    monkeypatch.setattr(window, "AHEAD", 20_000)
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(96, 96)) / 10, jnp.float32) for _ in range(4)]
    x = jnp.asarray(rng.normal(size=(rows, 96)), jnp.float32)

    def loop(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def body(state: Any) -> Any:
            count, x = state
            for w in weights:
                x = jnp.tanh(x @ w)
            return count + 1, x

        return lax.while_loop(lambda state: state[0] < 2, body, (0, x))[1]

    mesh = zerojax.mesh(axes={"data": 8})
    inserter = Inserter(mesh, "data", keep=False, share=True, most_held=0)
    closed = jax.make_jaxpr(loop)(x, *weights)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    sharded = [jax.device_put(w, sharding) for w in weights]
    inserted = jax.jit(
        lambda x, *ws: inserter(closed, [x, *(Shard(w, ("data", None)) for w in ws)])[0]
    )
    assert "bitcast_convert" in inserted.lower(x, *sharded).as_text()
    np.testing.assert_allclose(inserted(x, *sharded), loop(x, *weights), rtol=1e-5, atol=1e-6)
