"""What the ledger notes of the collectives that are emitted."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import zerojax
from zerojax.collectives.decisions import Decision
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.ledger import Ledger

AXES = {
    "data": {"data": 8},
    "model": {"data": 4, "model": 2},
    "replica": {"replica": 2, "data": 4},
    "parts": {"data": 8},
}


def noted(
    mesh: Mesh, gradient: bool, shape: tuple[int, ...], spec: tuple[object, ...]
) -> list[Decision]:
    """What is noted of a gather to the spec without the axis, or of a reduction to the spec."""
    gatherer = Gatherer(mesh, "data", keep=False)
    ledger = gatherer.ledger = Ledger(mesh, asked=True)

    def run(x: jax.Array) -> jax.Array:
        return gatherer.scatter_parts(x, spec) if gradient else gatherer.all_gather(x, spec)

    closed = jax.make_jaxpr(run)(jax.ShapeDtypeStruct(shape, jnp.float32))
    names = [str(eqn.source_info.name_stack) for eqn in closed.eqns]
    return [x for each in names for number in ledger.numbers(each) for x in ledger[number]]


@pytest.mark.parametrize(
    ("mesh", "spec", "sent"),
    [
        ("data", ("data", None), [("all-gather", 16 * 24, 8)]),
        ("data", (None, None), []),
        ("model", ("data", "model"), [("all-gather", 16 * 12, 4)]),
        ("replica", (None, "data"), [("all-gather", 16 * 24, 4)]),
        # The outer part first: of 4 devices' shards, then of all.
        ("parts", ("data:(1)4", "data:(4)2"), [("all-gather", 192, 4), ("all-gather", 384, 2)]),
    ],
)
def test_gathers(mesh: str, spec: tuple[object, ...], sent: list[tuple[str, int, int]]) -> None:
    found = noted(zerojax.mesh(axes=AXES[mesh]), False, (16, 24), spec)
    assert [(x.kind, x.payload // 4, x.devices) for x in found] == sent


@pytest.mark.parametrize(
    ("mesh", "spec", "sent"),
    [
        ("data", ("data", None), [("reduce-scatter", 384, 8)]),
        ("data", (None, None), [("all-reduce", 384, 8)]),
        ("model", ("data", "model"), [("reduce-scatter", 192, 4)]),
        ("replica", (None, "data"), [("reduce-scatter", 384, 4), ("all-reduce", 96, 2)]),
        (
            "parts",
            ("data:(1)4", "data:(4)2"),
            [("reduce-scatter", 384, 2), ("reduce-scatter", 192, 4)],
        ),
    ],
)
def test_reductions(mesh: str, spec: tuple[object, ...], sent: list[tuple[str, int, int]]) -> None:
    found = noted(zerojax.mesh(axes=AXES[mesh]), True, (16, 24), spec)
    assert [(x.kind, x.payload // 4, x.devices) for x in found] == sent


def test_shards_that_are_not_equal_count_with_their_padding() -> None:
    (found,) = noted(zerojax.mesh(), False, (20, 3), ("data", None))
    assert (found.shape, found.payload) == ((20, 3), 24 * 3 * 4)
