"""Parameters that a pass uses several times: gathered once in each pass, by the decisions."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.collectives import Inserter, Shard
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import collectives

WIDTH, ROWS, WORDS = 256, 4096, 2048
SHAPES = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "table": (WORDS, WIDTH)}

Model = Callable[[Any, jax.Array], jax.Array]


def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def repeated(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = block(p, x)
    return x


def rematerialised(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        x = jax.checkpoint(block)(p, x)
    return x


def cast(p: Any, x: jax.Array) -> jax.Array:
    for _ in range(4):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        x = block(low, x.astype(jnp.bfloat16))
    return x


def exits(p: Any, x: jax.Array) -> jax.Array:
    x, outs = block(p, x), []
    for _ in range(4):
        x = jnp.tanh(x)
        outs.append(x @ p["table"].T)
    return jnp.stack(outs)


def tied(p: Any, x: jax.Array) -> jax.Array:
    return block(p, p["table"][jnp.argmax(x, -1)]) @ p["table"].T


def with_arguments(zero: zerojax.Zero, model: Model, rows: int = ROWS) -> Any:
    """A step with its abstract arguments."""

    def train_step(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return jnp.mean(jnp.square(model(params, batch).astype(jnp.float32)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def create_state() -> TrainState:
        params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    batch = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    return zero(train_step), (zero.abstract_state(create_state), batch)


def gathers(model: Model) -> dict[str, int]:
    """The number of gathers of each parameter in a step."""
    step, args = with_arguments(zerojax.zero(stage=3), model)
    found = {name: 0 for name in SHAPES}
    for row in step.collectives(*args).rows:
        if row.kind == "all-gather":
            for array in row.arrays:
                found[array.split("'")[1]] += row.times
    return {name: n for name, n in found.items() if n}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (repeated, {"up": 2, "down": 2}),
        (rematerialised, {"up": 2, "down": 2}),
        (cast, {"up": 2, "down": 2}),
        (exits, {"up": 1, "down": 2, "table": 2}),
        (tied, {"up": 2, "down": 2, "table": 2}),
    ],
)
def test_each_pass_gathers_a_parameter_once(model: Model, expected: dict[str, int]) -> None:
    assert gathers(model) == expected


@pytest.mark.parametrize("axes", [{"data": 8}, {"replica": 2, "data": 4}, {"data": 4, "seq": 2}])
@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_rematerialised_blocks_are_equal(keep: bool, axes: dict[str, int]) -> None:
    mesh = zerojax.mesh(axes=axes)
    specs = ("data", None), (None, "data")
    inserter = Inserter(mesh, "data", keep=keep)

    def loss(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(rematerialised({"up": up, "down": down}, x)))

    def run(up: jax.Array, down: jax.Array, x: jax.Array) -> Any:
        closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(up, down, x)
        shards = map(Shard, (up, down), specs)
        rows = RowDimensions.of_program(closed, [None, None, 0])
        return inserter(closed, [*shards, x], want=specs, rows=rows)

    args = map(jnp.zeros, ((8, 16), (16, 8), (16, 4, 8)))
    assert exact.differing(run, jax.grad(loss, (0, 1)), *args) == []


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_each_block_computes_its_gradients_in_turn() -> None:
    """Deferred to the last block, the products would keep the activations of all blocks."""
    zero = zerojax.zero(stage=3, bf16=True, mesh=zerojax.topology("h100", 8))
    step, args = with_arguments(zero, rematerialised, rows := 2**18)
    program: Any = step.lower(*args).compile()
    sent = (each for each in collectives(program.as_text()) if each.kind == "reduce-scatter")
    assert sum(each.moved_bytes for each in sent) == pytest.approx(
        7 / 8 * 4 * 8 * WIDTH**2, rel=0.05
    )
    activation = 4 * 4 * WIDTH * rows // 8  # the wider one of a block, in float32
    assert program.memory_analysis().temp_size_in_bytes < 4 * activation
