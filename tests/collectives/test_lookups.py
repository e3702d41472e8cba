"""Few rows looked up in a table move, and the table does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxprs import Spec, gathers

import zerojax
from zerojax.collectives import Inserter, Shard, lookups

MESH = zerojax.mesh()
ROWS, COLUMNS = ("data", None), (None, "data")
TABLE = np.random.default_rng(0).normal(size=(64, 16))


def lookup(rows: int, *, shape: tuple[int, int] = (64, 16)) -> Any:
    """The equation of a lookup."""
    abstract = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct((rows,), "int32")
    closed = jax.make_jaxpr(lambda table, ids: table.at[ids].get(mode="clip"))(*abstract)
    (eqn,) = [e for e in closed.jaxpr.eqns if e.primitive.name == "gather"]
    return eqn


@pytest.mark.parametrize(
    ("rows", "spec", "want"),
    [
        (32, ROWS, ROWS),
        (63, ROWS, ROWS),
        (64, ROWS, None),  # as many as the table has
        (32, COLUMNS, ROWS),
        (60, COLUMNS, None),  # with an eighth of the table
        (32, ("data:(1)4", "data:(4)2"), None),
        (32, (None, None), None),
    ],
)
def test_the_bytes_decide(rows: int, spec: Spec, want: Spec | None) -> None:
    assert lookups.spec_by_rows(lookup(rows), spec, MESH, "data") == want


def test_a_padded_table_is_gathered() -> None:
    assert lookups.spec_by_rows(lookup(8, shape=(61, 16)), ROWS, MESH, "data") is None
    assert lookups.spec_by_rows(lookup(8, shape=(61, 16)), COLUMNS, MESH, "data") is None


def test_replica_groups_move_their_own_rows() -> None:
    mesh = zerojax.mesh(replicas=2)
    assert lookups.spec_by_rows(lookup(100), ROWS, mesh, "data") == ROWS
    assert lookups.spec_by_rows(lookup(128), ROWS, mesh, "data") is None


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
    ids = np.random.default_rng(1).integers(-70, 140, size=(8, 4))
    inserter, function = Inserter(MESH, "data", keep=False), rows_of(mode)
    closed = jax.make_jaxpr(function)(TABLE, ids)

    def run(table: jax.Array, ids: jax.Array) -> jax.Array:
        return inserter(closed, [Shard(table, spec), ids])[0]

    assert gathers(jax.make_jaxpr(run)(TABLE, ids)) == []
    placed = jax.device_put(TABLE, NamedSharding(MESH, PartitionSpec(*spec)))
    ids_placed = jax.device_put(ids, NamedSharding(MESH, PartitionSpec("data")))
    np.testing.assert_array_equal(jax.jit(run)(placed, ids_placed), function(TABLE, ids))


def test_a_table_that_is_whole_anyway_serves_its_lookups() -> None:
    """In an evaluation one gather serves all uses."""
    inserter = Inserter(MESH, "data", keep=False, share=True)
    ids = np.arange(8)

    def both(table: jax.Array, ids: jax.Array) -> jax.Array:
        return table[ids] + (table @ jnp.ones(16))[0]

    closed = jax.make_jaxpr(both)(TABLE, ids)
    jaxpr = jax.make_jaxpr(lambda t, i: inserter(closed, [Shard(t, ROWS), i]))(TABLE, ids)
    assert len(gathers(jaxpr)) == 1
