"""Few rows looked up in a table move, and the table does not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxprs import Spec, gathers

import zerojax
from zerojax.collectives import Inserter, Shard, lookups
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import collectives

MESH = zerojax.mesh()
ROWS, COLUMNS = ("data", None), (None, "data")
TABLE = np.random.default_rng(0).normal(size=(64, 16))


def spec_by_rows(
    ids: Sequence[int],
    spec: Spec,
    *,
    rows: int | None = None,
    shape: tuple[int, int] = (64, 16),
    mesh: Mesh = MESH,
) -> Spec | None:
    """The spec of a table during a lookup with indices of this shape, of which a dimension may have
    rows."""
    abstract = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct(ids, "int32")
    closed = jax.make_jaxpr(lambda table, ids: table.at[ids].get(mode="clip"))(*abstract)
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "gather"]
    gatherer = Inserter(mesh, "data", keep=False)
    return lookups.spec_by_rows(eqn, spec, gatherer, RowDimensions.of_program(closed, [None, rows]))


@pytest.mark.parametrize(
    ("rows", "spec", "want"),
    [
        (16, ROWS, ROWS),
        (31, ROWS, ROWS),
        (32, ROWS, None),  # half of the table
        (24, COLUMNS, ROWS),
        (28, COLUMNS, None),  # with an eighth of the table
        (16, ("data:(1)4", "data:(4)2"), None),
        (16, (None, None), None),
    ],
)
def test_the_bytes_decide(rows: int, spec: Spec, want: Spec | None) -> None:
    assert spec_by_rows([rows], spec) == want


def test_a_padded_table_is_gathered() -> None:
    assert spec_by_rows([8], ROWS, shape=(61, 16)) is None
    assert spec_by_rows([8], COLUMNS, shape=(61, 16)) is None


def test_replica_groups_move_their_own_rows() -> None:
    mesh = zerojax.mesh(replicas=2)
    assert spec_by_rows([8, 6], ROWS, rows=0, mesh=mesh) == ROWS
    assert spec_by_rows([8, 8], ROWS, rows=0, mesh=mesh) is None
    # Without rows, like positions, they are the same in every group.
    assert spec_by_rows([8, 6], ROWS, mesh=mesh) is None


def rows_of(mode: str) -> Callable[..., jax.Array]:
    def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
        return (
            jnp.asarray(table)
            .at[ids]
            .get(mode=mode, **({"fill_value": 7.0} if mode == "fill" else {}))
        )

    return looked_up


@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_are_those_of_the_table(mode: str, spec: Spec) -> None:
    """Beyond the table, and before it, as well."""
    ids = np.random.default_rng(1).integers(-70, 140, size=(8, 2))
    inserter, function = Inserter(MESH, "data", keep=False), rows_of(mode)
    closed = jax.make_jaxpr(function)(TABLE, ids)

    def run(table: jax.Array, ids: jax.Array) -> jax.Array:
        return inserter(closed, [Shard(table, spec), ids])[0]

    assert gathers(jax.make_jaxpr(run)(TABLE, ids)) == []
    placed = jax.device_put(TABLE, NamedSharding(MESH, PartitionSpec(*spec)))
    ids_placed = jax.device_put(ids, NamedSharding(MESH, PartitionSpec("data")))
    np.testing.assert_array_equal(jax.jit(run)(placed, ids_placed), function(TABLE, ids))


def test_a_table_that_is_gathered_anyway_serves_its_lookups() -> None:
    """In an evaluation one gather serves all uses."""
    inserter = Inserter(MESH, "data", keep=False, share=True)
    ids = np.arange(8)

    def both(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table[ids] + (table @ jnp.ones(16))[0]

    def times(function: Callable[..., Any]) -> int:
        closed = jax.make_jaxpr(function)(TABLE, ids)
        run = jax.make_jaxpr(lambda t, i: inserter(closed, [Shard(t, ROWS), i]))
        return len(gathers(run(TABLE, ids)))

    assert times(both) == 1
    assert times(lambda table, ids: table[ids]) == 0


ENTRIES, FEATURES, TABLES, BATCH = 65536, 64, 4, 1024


def lowered() -> jax.stages.Lowered:
    """A step that looks up a row of each table for each row of the batch."""
    mesh = zerojax.topology("h100", 8)
    zero = zerojax.zero(stage=3, bf16=True, mesh=mesh)

    def create() -> TrainState:
        params: Any = {f"table{i}": jnp.zeros((ENTRIES, FEATURES)) for i in range(TABLES)}
        params["out"] = jnp.zeros((TABLES * FEATURES, 512))
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))

    @zero
    def step(state: TrainState, ids: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            rows = [jnp.take(params[f"table{i}"], ids[:, i], axis=0) for i in range(TABLES)]
            return jnp.mean(jnp.square(jnp.concatenate(rows, -1) @ params["out"]))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    ids = jax.ShapeDtypeStruct((BATCH, TABLES), jnp.int32)
    return step.lower(zero.abstract_state(create), ids)


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_rows_are_all_that_is_sent_of_the_tables() -> None:
    """Forward summed over the devices, backward gathered; and no table is ever gathered."""
    compiled: Any = lowered().compile()
    units: dict[str, float] = {}
    row_bytes = 2 * TABLES * BATCH * FEATURES
    others = 2 * TABLES * FEATURES * 512
    for each in collectives(compiled.as_text()):
        units[each.kind] = units.get(each.kind, 0) + each.times * each.payload_bytes
    ids = 4 * TABLES * BATCH
    assert units["reduce-scatter"] == pytest.approx(row_bytes + others, rel=0.01)
    assert units["all-gather"] == pytest.approx(row_bytes + 2 * others + ids, rel=0.01)
    assert units.get("all-reduce", 0) < 100
    whole = 2 * ENTRIES * FEATURES
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * whole
