"""What the ledger notes of the collectives that are emitted, and where."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh

import zerojax
from zerojax.collectives import decisions
from zerojax.collectives.decisions import Decision
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.ledger import Ledger
from zerojax.graph.rows import RowDimensions
from zerojax.hlo.traffic import ring_bytes
from zerojax.plan.layout import LeafSpec, with_leaves
from zerojax.xla.jaxprs import open_jaxpr

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

    jax.make_jaxpr(run)(jax.ShapeDtypeStruct(shape, jnp.float32))
    return ledger.decisions


def sends(sent: list[tuple[str, int, int]]) -> list[tuple[str, int]]:
    """Kinds and bytes that a device sends, from kinds, elements and devices."""
    return [(kind, round(ring_bytes(kind, 4 * size, devices))) for kind, size, devices in sent]


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
    assert [(x.kind, x.bytes) for x in found] == sends(sent)


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
    assert [(x.kind, x.bytes) for x in found] == sends(sent)


def test_shards_that_are_not_equal_count_with_their_padding() -> None:
    (found,) = noted(zerojax.mesh(), False, (20, 3), ("data", None))
    assert (found.shape, found.bytes) == ((20, 3), 24 * 3 * 4 * 7 // 8)


ARRAY = jax.ShapeDtypeStruct((16, 24), jnp.float32)
ROWS, UNSHARDED = ("data", None), (None, None)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(zerojax.mesh(), asked=True)


def test_nothing_is_recorded_unless_somebody_asks() -> None:
    ledger = Ledger(zerojax.mesh())
    ledger.gathers(ARRAY, ROWS, UNSHARDED)
    ledger.reduces(ARRAY, UNSHARDED, ROWS)
    assert ledger.decisions == []


def test_a_decision_has_the_innermost_place_and_the_runs_of_all_loops(ledger: Ledger) -> None:
    with ledger.place(decisions.LOOP, "outer"), ledger.repeats(3):
        with ledger.place(decisions.PREFETCHED, "inner"), ledger.repeats(5):
            ledger.gathers(ARRAY, ROWS, UNSHARDED)
        with ledger.repeats(1, exact=False):
            ledger.gathers(ARRAY, ROWS, UNSHARDED)
    ledger.gathers(ARRAY, ROWS, UNSHARDED)
    assert [(x.where, x.reason, x.times, x.exact) for x in ledger.decisions] == [
        (decisions.PREFETCHED, "inner", 15, True),
        (decisions.LOOP, "outer", 3, False),
        (decisions.USE, "gathered once a pass, not kept", 1, True),
    ]


def test_the_leaves_are_those_of_the_spec(ledger: Ledger) -> None:
    spec = LeafSpec(ROWS, "params['a']")
    with ledger.of(with_leaves(UNSHARDED, spec)), ledger.of(ROWS):
        ledger.gathers(ARRAY, ROWS, UNSHARDED)
    assert [x.arrays for x in ledger.decisions] == [("params['a']",)]
    assert spec == ROWS


def test_of_several_traces_of_one_body_the_last_counts(ledger: Ledger) -> None:
    traces = []

    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        traces.append(1)
        ledger.gathers(ARRAY, ROWS, UNSHARDED)
        return carry + jnp.float32(1.0), None  # not the start's dtype: traced again

    jax.make_jaxpr(lambda: lax.scan(ledger.last_trace(body), 1, None, length=3))()
    assert (len(traces), len(ledger.decisions)) == (2, 1)


def test_other_collectives_replace_those_of_a_constraint(ledger: Ledger) -> None:
    """Row numbers are gathered once."""
    numbers = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    for _ in range(2):
        with ledger.instead((decisions.GATHER, numbers), (decisions.SCATTER, ARRAY)):
            ledger.reduces(ARRAY, UNSHARDED, ROWS)
    found = [(x.kind, x.dtype) for x in ledger.decisions]
    scatter = decisions.SCATTER, "float32"
    assert found == [(decisions.GATHER, "int32"), scatter, scatter]


def test_values_of_the_batch_alone_are_reduced(ledger: Ledger) -> None:
    """A number that is computed from them is the same on all devices."""

    def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return x.T @ x, w.T @ w, w * x.sum()

    jaxpr, _ = open_jaxpr(jax.make_jaxpr(program)(ARRAY, ARRAY))
    ledger.follow(jaxpr, RowDimensions.of_program(jaxpr, [0, None]))
    for eqn in jaxpr.eqns:
        with ledger.within(eqn):
            ledger.reduces(eqn.outvars[0].aval, UNSHARDED, ROWS)
    assert [x.shape for x in ledger.decisions] == [(24, 16), (24, 24)]


def test_of_equal_reductions_that_are_added_one_counts(ledger: Ledger) -> None:
    """XLA adds the partial sums first, unless another value waits for one of the results."""
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(lambda x, y: x.T + y.T)(ARRAY, ARRAY))
    for waits, left in ((False, 1), (True, 2)):
        ledger.decisions.clear()
        x, y = jnp.ones((16, 24)), jnp.ones((16, 24))
        for value in (x, y):
            first = len(ledger.decisions)
            ledger.reduces(value, UNSHARDED, ROWS)
            ledger.record_reduction([value], first)
        if waits:
            ledger.awaits([x])
        run = ledger.recording(lambda eqn, values: [jnp.ones(eqn.outvars[0].aval.shape)], jaxpr)
        one, other = (run(eqn, [z])[0] for eqn, z in zip(jaxpr.eqns, (x, y), strict=False))
        run(jaxpr.eqns[2], [one, other])
        assert len(ledger.decisions) == left
