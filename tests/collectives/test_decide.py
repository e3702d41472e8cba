"""The decisions on programs and loops: what is gathered and reduced, and where. Nothing is
compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from collectives.test_carried_sums import MESH, ROWS, STACK, N, weight
from collectives.test_carried_sums import layers as layers_over_time
from jax import lax

import zerojax
from zerojax.collectives import Inserter, Shard, carried_sums, decide
from zerojax.collectives.gathering import Gatherer, Scope, Thresholds
from zerojax.collectives.gradients import Reduction, Terms
from zerojax.collectives.insert import Decider
from zerojax.collectives.shard import Abstract
from zerojax.collectives.uses import Kind
from zerojax.graph.def_use import graph_of
from zerojax.graph.rows import RowDimensions
from zerojax.plan.quantized import Quantization, Sent
from zerojax.xla import jaxprs

ONE = (N, N)
LAYERS = (4, N, N)


def is_held(function: Callable[..., Any], spec: Any, *shapes: tuple[int, ...]) -> bool:
    """Whether a body that takes a constant first needs it unsharded; the rest is carried."""
    jaxpr = jax.make_jaxpr(function)(*(weight(*shape) for shape in shapes), 0)
    shard, at_stage_3 = Shard(weight(*shapes[0]), spec), Gatherer(MESH, "data", keep=False)
    return decide.find_constants(jaxpr, [shard], at_stage_3, RowDimensions()) == {0}


def test_what_an_iteration_needs() -> None:
    def remat(w: Any, x: Any, i: Any) -> Any:
        return jax.checkpoint(lambda w, x: layers_over_time(w.astype("bfloat16"), x))(w, x)

    turned = jax.jit(lambda w, x, i: x @ w.T.astype("bfloat16"))
    assert is_held(lambda w, x, i: x @ w, ROWS, ONE, ONE)
    assert is_held(turned, ROWS, ONE, ONE)
    assert is_held(lambda w, x, i: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), ROWS, ONE, ONE)
    assert not is_held(lambda w, x, i: layers_over_time(w, x), STACK, LAYERS, (3, 8, N))
    assert not is_held(lambda w, x, i: (w, x), ROWS, ONE, ONE)
    assert not is_held(remat, STACK, LAYERS, (3, 8, N))


def test_a_layer_an_iteration() -> None:
    def by_call(w: Any, x: Any, i: Any) -> Any:
        return jax.jit(lambda w, i: x @ w[i])(w.transpose(0, 2, 1), i)

    assert not is_held(lambda w, x, i: x @ w[i], STACK, LAYERS, ONE)
    assert not is_held(by_call, STACK, LAYERS, ONE)
    # The same layer in each iteration; a dimension that is sharded; rows of a table.
    assert is_held(lambda w, x, i: x @ w[1], STACK, LAYERS, ONE)
    assert is_held(lambda w, x, i: x @ w[i], ("data", None, None), LAYERS, ONE)
    assert is_held(lambda w, x, i: x + w[i], (None, "data"), ONE, ONE)


@pytest.mark.parametrize(("dimensions", "stacks"), [(3, True), (2, False)])
def test_the_gradient_of_a_layer_stays_in_its_stack(dimensions: int, stacks: bool) -> None:
    shape = LAYERS[-dimensions:]

    def loss(w: Any, x: Any) -> Any:
        def body(i: Any, x: Any) -> Any:
            return jnp.tanh(x * w[i].sum(0) if stacks else x * w[i])

        return lax.fori_loop(0, len(w), body, x).sum()

    closed = jax.make_jaxpr(jax.grad(loss))(weight(*shape), weight(8, N))
    *_, loop = graph_of(jaxprs.open_jaxpr(closed)[0]).named("scan")
    specs = [(None,) * (v.aval.ndim - 1) + ("data",) if v.aval.shape == shape else None
             for v in loop.outvars]  # fmt: skip
    assert bool(carried_sums.CarriedSums(jaxprs.scan_parts(loop), specs).stacks) is stacks


REPLICAS = zerojax.mesh(axes={"replica": 2, "data": 4})
SENT = Sent(gradients=Quantization("int8"))
IDS = jax.ShapeDtypeStruct((N, N), jnp.int32)
WIDE = (128, 256)


def product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def looked_up(w: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(w[ids] ** 2)


@pytest.mark.parametrize(
    ("loss", "shape", "x", "terms", "options"),
    [
        (product, ONE, weight(8, N), Terms.WHOLE, {}),
        (product, WIDE, weight(8, 128), Terms.NONE, {"thresholds": Thresholds(in_place=0)}),
        (product, WIDE, weight(8, 128), Terms.ROW_SUMS, {"sent": SENT}),
        (looked_up, (N, 256), IDS, Terms.TABLE, {}),
        (looked_up, (64 * N, 256), IDS, Terms.ROWS, {}),
        (looked_up, (N, 256), IDS, Terms.BY_GROUP, {"mesh": REPLICAS}),
        (looked_up, WIDE, IDS, Terms.BY_DEVICE, {"sent": SENT}),
        (looked_up, (64 * N, 256), IDS, Terms.ROWS, {"sent": SENT}),
    ],
)
def test_the_terms_of_a_gradient(
    loss: Any, shape: Any, x: Any, terms: Terms, options: dict[str, Any]
) -> None:
    gatherer = Gatherer(options.pop("mesh", MESH), "data", keep=False, **options)
    (found,) = reductions(loss, shape, x, gatherer)
    assert found.terms is terms
    assert (found.product is None) is (terms is not Terms.NONE)
    assert (found.row_sum is None) is (terms is not Terms.ROW_SUMS)


def test_padded_and_unquantized_gradients() -> None:
    (uneven,) = reductions(product, (N + 1, N), weight(8, N + 1), Gatherer(MESH, "data", keep=True))
    assert uneven.padded == [[8, N], [8, N + 8]]
    quantizes = Gatherer(MESH, "data", keep=False, sent=SENT)
    (unknown,) = reductions(
        lambda w, x: jnp.sum(lax.cumsum(w, 0) * x), WIDE, weight(*WIDE), quantizes
    )
    assert unknown.unquantized


def reductions(loss: Any, shape: Any, x: Any, gatherer: Gatherer) -> list[Reduction]:
    """The reductions of a program that computes the gradient of its first argument."""
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(jax.grad(loss))(weight(*shape), x))
    scope = Scope(share=False, row_dims=RowDimensions.of_program(jaxpr, [None, 0]))
    decided = decide.decide_program(jaxpr, [weight(*shape), x], [ROWS], gatherer, scope, None)
    return [*decided.reductions.values()]


def decided(
    function: Any, *args: Any, want: Any, thresholds: Any = None
) -> decide.ProgramDecisions:
    """The decisions on a function at stage 3. Its last argument is a batch [rows, ...]; pairs of a
    shape and a spec are shards."""
    shards = [Shard(Abstract(shape, jnp.dtype("float32")), spec) for shape, spec in args[:-1]]
    shapes = [*(weight(*shape) for shape, _ in args[:-1]), weight(*args[-1])]
    jaxpr = jax.make_jaxpr(function)(*shapes)
    rows = RowDimensions.of_program(jaxpr, [*[None] * len(shards), 0])
    scope = Scope(share=False, row_dims=rows, defers=True)
    inserter = Inserter(MESH, "data", keep=False, thresholds=thresholds)
    given = [*shards, Abstract(args[-1], jnp.dtype("float32"))]
    found, _ = Decider(inserter).decide(jaxpr, given, scope, want)
    return found


def tree(program: decide.ProgramDecisions) -> list[Any]:
    """The decisions on a program as lists: for each equation on which something was decided its
    primitive, the use of shards, what a loop gathers ahead and reduces later, and its programs."""
    return [
        [
            at.eqn.primitive.name,
            at.use and at.use.kind.name,
            at.scan and ({i: d.name for i, d in at.scan.prefetched.items()}, [*at.scan.deferred]),
            [each and each.terms.name for each in at.reductions if each],
            *map(tree, at.programs),
        ]
        for at in program.inside.values()
    ]


def test_the_decisions_on_a_scanned_model() -> None:
    """Each layer is gathered one iteration ahead, in both loops, and its gradient is reduced one
    iteration later; the head is gathered at each use."""

    def loss(head: Any, layers: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w.astype("bfloat16")), None

        x, _ = lax.scan(layer, x.astype("bfloat16"), layers)
        return jnp.sum(x.astype("float32") @ head)

    args = (ONE, ROWS), (LAYERS, (None, *ROWS)), (8, N)
    want = [ROWS, (None, *ROWS)]
    found, again = (decided(jax.grad(loss, (0, 1)), *args, want=want) for _ in range(2))
    assert tree(found) == tree(again)
    forward, backward = (at for at in found.inside.values() if at.scan)
    ahead = {0: jnp.dtype("bfloat16")}
    assert forward.scan.prefetched == ahead
    assert not forward.scan.deferred
    assert [*backward.scan.prefetched.values()] == [*ahead.values()]
    assert len(backward.scan.deferred) == 1
    assert not backward.scan.constants
    (body,) = forward.programs
    assert [at.use.kind for at in body.inside.values()] == [Kind.ON_SHARDS, Kind.UNSHARDED]
    uses = [at.use.kind for at in found.inside.values() if at.use]
    assert Kind.UNSHARDED in uses
    assert [each.terms for each in found.reductions.values()] == [Terms.WHOLE]


def test_the_decisions_on_branches_and_loops() -> None:
    """A branch gathers within; its result is a shard if both branches return a shard of one spec. A
    loop gathers what each iteration needs before it, and carries the state that it updates as
    shards."""

    def choice(w: Any, x: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda: w * 2, lambda: w), lax.cond(
            x[0, 0] > 0, lambda: x @ w, lambda: x
        )

    first, second = decided(choice, (ONE, ROWS), (8, N), want=[None, None]).inside.values()
    assert [first.results, second.results] == [[ROWS], [None]]
    kinds = [[at.use.kind for at in branch.inside.values()] for branch in second.programs]
    assert sorted(map(len, kinds)) == [0, 1]
    assert [Kind.UNSHARDED] in kinds

    def loop(w: Any, average: Any, x: Any) -> Any:
        def body(carry: Any) -> Any:
            average, x, i = carry
            return average * 0.9 + w * 0.1, x @ w, i + 1

        return lax.while_loop(lambda carry: carry[2] < 3, body, (average, x, 0))

    shards = (ONE, ROWS), (ONE, ROWS)
    thresholds = Thresholds(small=0)
    (at,) = decided(loop, *shards, (8, N), want=[None] * 3, thresholds=thresholds).inside.values()
    assert at.loop == ({0: ROWS}, [set(), {0}])


def test_a_table_and_a_wide_weight_stay_sharded() -> None:
    def step(table: Any, w: Any, x: Any) -> Any:
        return table[x[:, 0].astype(int)] @ w

    thresholds = Thresholds(in_place=0)
    args = ((64 * N, N), ROWS), ((N, 8 * N), (None, "data")), (8, N)
    found = decided(step, *args, want=[None], thresholds=thresholds)
    sends = [at.use.sends for at in found.inside.values() if at.use and at.use.sends]
    assert [type(each).__name__ for each in sends] == ["TableLookup", "Product"]
