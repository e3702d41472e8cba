"""Lookups in one table share its gather at stage 3."""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from emitted import check_step
from equal import zero_for
from flax.training.train_state import TrainState
from jaxprs import gathers

import zerojax
from zerojax.collectives import Inserter, Shard
from zerojax.hlo.traffic import collectives

pytestmark = pytest.mark.usefixtures("quick_compile")

WORDS, WIDTH, TOKENS = 64, 16, 24
MESH = zerojax.mesh()
Loss = Callable[[Any, jax.Array, jax.Array], jax.Array]


def shifted(target: jax.Array) -> jax.Array:
    return jnp.pad(target[:, :-1], ((0, 0), (1, 0)))


def translated(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """An encoder and a decoder with one table, tied to the output."""
    x = jnp.tanh(jnp.take(p["table"], source, axis=0) @ p["encoder"])
    y = jnp.take(p["table"], shifted(target), axis=0)
    y = jnp.tanh((y + x.mean(1, keepdims=True)) @ p["decoder"])
    return optax.softmax_cross_entropy_with_integer_labels(y @ p["table"].T, target).mean()


def cast(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """Each lookup, and the output, cast the table, as modules do that compute in another dtype."""

    def low(name: str) -> jax.Array:
        return p[name].astype(jnp.float32 if p[name].dtype == jnp.float64 else jnp.float16)

    x = jnp.tanh(jnp.take(low("table"), source, axis=0) @ low("encoder"))
    y = low("table")[shifted(target)]
    y = jnp.tanh((y + x.mean(1, keepdims=True)) @ low("decoder"))
    return jnp.mean((y @ low("table").T).astype(jnp.float32) ** 2)


def towers(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """One encoder for both, by NumPy's indexing."""

    def encoded(tokens: jax.Array) -> jax.Array:
        return jnp.tanh(p["table"][tokens] @ p["encoder"]).mean(1)

    return jnp.mean((encoded(source) - encoded(target)) ** 2)


def cast_to_integers(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """Rows of a table of codes, one of which is an index of another table."""

    def row(codes: jax.Array, at: jax.Array) -> jax.Array:
        return jax.jit(lambda codes, at: codes[at].astype(p["table"].dtype))(codes, at)

    x = p["table"][source]
    codes = p["rows"].astype(jnp.int32)
    again = p["rows"].astype(jnp.int32)
    y = row(codes, source[:, :2]) * row(again, target[:, :2])
    return jnp.mean(jnp.tanh(x * p["table"][again[target % 2, 0] % WORDS])) + jnp.mean(y)


def found_first(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """The second tokens follow from what was computed of the first."""
    x = jnp.take(p["table"], source, axis=0) @ p["encoder"]
    y = jnp.take(p["table"], jnp.argmax(x, -1), axis=0)
    return jnp.mean((x + y) ** 2)


def indices_first(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """A jitted lookup that returns indices alone, for the next lookup."""
    found = jax.jit(lambda table, at: jnp.argmax(table[at], -1))(p["table"], source)
    return jnp.mean(jnp.tanh(p["table"][source] * p["table"][found] @ p["encoder"]))


def weighed(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """The rows are what a gradient of their shape is computed from."""
    a, b = (p["table"][tokens[:2].reshape(-1)] for tokens in (source, target))
    weights = jnp.sum(p["rows"] * a) + jnp.sum(p["rows"] * b * 2)
    return weights + jnp.sum(jnp.tanh(a @ p["encoder"])) + jnp.sum(jnp.tanh(b @ p["encoder"]))


def few(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """So few tokens that rows are sent, and not the table."""
    x, y = (jnp.take(p["table"], tokens[:, :1], axis=0) for tokens in (source, target))
    return jnp.mean(jnp.tanh(x @ p["encoder"]) * jnp.sin(y))


def printed(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
    """The table is the operand of a callback, which has no result."""
    jax.debug.callback(lambda table: None, p["table"])
    return towers(p, source, target)


LOSSES = pytest.mark.parametrize(
    ("loss", "times"),
    [
        (translated, 3), (cast, 3), (towers, 1), (found_first, 2), (indices_first, 2), (weighed, 1),
        (few, 0), (printed, 2), (cast_to_integers, 1),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip


def create() -> TrainState:
    draw = np.random.default_rng(0).normal
    params = {
        "table": draw(size=(WORDS, WIDTH)) / 4,
        "encoder": draw(size=(WIDTH, WIDTH)),
        "decoder": draw(size=(WIDTH, WIDTH)),
        "rows": draw(size=(2 * TOKENS, WIDTH)),
    }
    params = jax.tree.map(jnp.asarray, params)
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))


def tokens(rows: int = 8) -> list[np.ndarray]:
    return list(np.random.default_rng(1).integers(0, WORDS, (2, rows, TOKENS), np.int32))


@LOSSES
def test_how_often_the_table_is_gathered(loss: Loss, times: int) -> None:
    """Forward; and once more for the output and its backward pass."""
    inserter, spec = Inserter(MESH, "data", keep=False), ("data", None)

    def run(params: Any, *batch: Any) -> Any:
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(params, *batch)
        shards = [Shard(x, spec) for x in jax.tree.leaves(params)]
        return inserter(closed, [*shards, *batch], rows=len(batch[0]))

    found = gathers(jax.make_jaxpr(run)(create().params, *tokens()))
    assert sum(sorted(move.shape) == [WIDTH, WORDS] for move in found) == times


@pytest.mark.parametrize(
    ("loss", "accumulation"),
    [
        *product([translated, towers, found_first, indices_first, few], [1, 2]),
        (cast, 1),  # each micro-batch would round its gradients
        (weighed, 1),  # takes rows apart
    ],
)
def test_the_numbers_of_plain_jit(loss: Loss, accumulation: int) -> None:
    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        return state.apply_gradients(grads=grads), value

    zero = zero_for(k=accumulation, small_array_size=0)
    check_step(zero, step, create, tokens(8 * accumulation))


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_what_8_h100s_gather() -> None:
    """The table three times: for the lookups, for the output and for its backward pass."""
    zero = zerojax.zero(
        stage=3,
        mesh=zerojax.topology("h100", 8),
        stage3_param_persistence_threshold=0,
        small_array_size=0,
    )

    @zero
    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(translated)(state.params, *batch)
        return state.apply_gradients(grads=grads), value

    batch = [jax.ShapeDtypeStruct((8, TOKENS), jnp.int32)] * 2
    lowered = step.lower(zero.abstract_state(create), batch)
    gathered = sum(
        each.times * each.bytes_by_dtype.get("f32", 0)
        for each in collectives(lowered.compile().as_text())
        if each.kind == "all-gather"
    )
    matrices = 3 * WIDTH * WIDTH  # not for the first product's backward pass
    assert gathered == pytest.approx(4 * (3 * WORDS * WIDTH + matrices), rel=0.1)


def test_two_tables_are_sent_quantized() -> None:
    """One after the other, as each is gathered for its lookup."""
    zero = zero_for(zero_quantized_weights=True, small_array_size=0)

    def loss(p: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((p["table"][source] @ p["encoder"] + p["rows"][target]) ** 2)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        return state.apply_gradients(grads=grads), value

    rows = zero(step).collectives(zero.abstract_state(create), tokens()).rows
    tables = {"params['table']", "params['rows']"}
    sent = {row.array: row.dtype for row in rows if row.kind == "all-gather" and row.bytes > 300}
    assert {array: sent[array] for array in tables} == dict.fromkeys(tables, "int8")
