"""Parameters that are gathered once a step: the dtype, what is computed from the copies, and the
stacks that loops take layer by layer."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives import large_layers
from jax import lax
from jaxprs import Move, gathers

import zerojax
from zerojax.collectives import Inserter, Shard, gather_once
from zerojax.collectives.prefetch import LEAST
from zerojax.graph.rows import RowDimensions
from zerojax.xla.unused import without_unused

MESH = zerojax.mesh()
N, LAYERS = 128, 3  # a matrix of so many rows and columns is not small
ROWS, STACKED = ("data", None), (None, "data", None)
HALF = jnp.float16


def in_micro_batches(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """``function(w, x)`` at stage 2 for each of the micro-batches ``x``."""
    inserter = Inserter(MESH, "data", keep=True)

    def run(w: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(function)(w, x[0])
        args = [Shard(inserter.constrain(w, spec), spec), x[0]]
        how = gather_once.decide_kept(
            closed, args, gather_once.by_plan(args, inserter), inserter, RowDimensions(), fill=False
        )
        given, _ = gather_once.gather(args, how, inserter)
        return lax.scan(lambda _, x: (None, inserter(closed, [given, x])), None, x)[1]

    return run


def shaped(spec: Any) -> tuple[int, ...]:
    return (LAYERS, N, N)[-len(spec) :]


def moves(function: Callable[..., Any], spec: Any) -> list[Move]:
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in (shaped(spec), (2, 4, N))]
    return gathers(jax.make_jaxpr(in_micro_batches(function, spec))(*arrays))


def transposed(w: Any, x: Any) -> Any:
    """A table tied to the output."""
    return jnp.tanh(x @ w) @ w.T


def rounded(w: Any, x: Any) -> Any:
    return x.astype(HALF) @ w.astype(HALF)


def rounded_and_transposed(w: Any, x: Any) -> Any:
    heads = w.reshape(N, 2, N // 2).astype(HALF).transpose(1, 0, 2)
    return jnp.einsum("bi,hij->bhj", x.astype(HALF), heads) + rounded(w.T, x)[:, None, : N // 2]


def decayed(w: Any, x: Any) -> Any:
    """The optimizer reads it in float32, piece by piece."""
    return rounded(w, x), w - 0.1 * w, jnp.sum(w**2)


@jax.jit
def called(w: Any, x: Any) -> Any:
    half = jax.jit(lambda w: w.astype(HALF))(w)
    return jax.checkpoint(lambda w, x: jnp.tanh(x.astype(HALF) @ w))(half, x)


def differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(w: Any, x: Any) -> Any:
        return jax.grad(lambda w, x: jnp.sum(function(w, x).astype("float32")), argnums=1)(w, x)

    return both


def layers(*, remat: bool) -> Callable[..., Any]:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(rounded(w, x)).astype("float32"), None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return differentiated(lambda w, x: lax.scan(body, x, w)[0])


HALVES = {
    "rounded": (rounded, ROWS),
    "rounded and transposed": (rounded_and_transposed, ROWS),
    "decayed": (decayed, ROWS),
    "called": (called, ROWS),
    "backward": (differentiated(rounded), ROWS),
    "remat": (differentiated(jax.checkpoint(rounded)), ROWS),
    "remat by itself": (differentiated(called), ROWS),
    "scan": (layers(remat=False), STACKED),
    "scan of remat": (layers(remat=True), STACKED),
}
WHOLES = {
    "transposed": (transposed, ROWS),
    "transposed, backward": (differentiated(transposed), ROWS),
    "both": (lambda w, x: rounded(w, x) + (x @ w).astype(HALF), ROWS),
    "two dtypes": (lambda w, x: rounded(w, x) + x.astype(HALF) @ w.astype("bfloat16"), ROWS),
    "carried": (lambda w, x: lax.scan(lambda w, _: (w, x @ w), w, None, length=2)[1], ROWS),
    "chosen": (lambda w, x: lax.cond(x[0, 0] > 0, rounded, rounded, w.T, x), ROWS),
    "captured": (
        lambda w, x: lax.scan(lambda x, _: (rounded(w, x) + x, None), x.astype(HALF), None, 2)[0],
        ROWS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HALVES)
def test_gathered_once_and_rounded(name: str) -> None:
    function, spec = HALVES[name]
    shape = (N, LAYERS, N) if spec is STACKED else shaped(spec)  # in the order that loops read
    assert moves(function, spec) == [Move((), shape, "float16")]


@pytest.mark.parametrize("name", WHOLES)
def test_gathered_once_as_it_is(name: str) -> None:
    function, spec = WHOLES[name]
    dtype = "float16" if name == "captured" else "float32"
    assert moves(function, spec) == [Move((), shaped(spec), dtype)]


@pytest.mark.parametrize("name", [*HALVES, *WHOLES])
def test_what_is_inserted_is_an_identity(name: str) -> None:
    function, spec = (HALVES | WHOLES)[name]
    w, x = np.zeros(shaped(spec), np.float32), np.zeros((2, 4, N), np.float32)

    def plain(w: Any, x: Any) -> Any:
        return lax.map(lambda x: jax.tree.leaves(function(w, x)), x)

    assert exact.differing(in_micro_batches(function, spec), plain, w, x) == []


LENGTH, INTO, OUT = LEAST, 128, 96
SPECS = [(None, "data", None), (None, None, "data")]


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w) @ w.T, None


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)


def loop(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(loss)(w, x)


def backwards(w: jax.Array, x: jax.Array) -> Any:
    return lax.scan(layer, x, w, reverse=True, unroll=3)


def updated(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * loop(w, x), jnp.sum(w**2)


def with_transposes(w: jax.Array, x: jax.Array) -> Any:
    return loop(w, x), x @ w[0] @ w.transpose(0, 2, 1)[1]


def returned(w: jax.Array, x: jax.Array) -> Any:
    return loop(w, x), w


def twice(w: jax.Array, x: jax.Array) -> Any:
    return jax.grad(lambda w: jnp.sum(lax.scan(layer, lax.scan(layer, x, w)[0], w)[0] ** 2))(w)


MOVED = [loop, backwards, updated, twice]
UNCHANGED = [with_transposes, returned]
FILLED = [loop, updated, twice]
FUNCTIONS = pytest.mark.parametrize("function", [*MOVED, *UNCHANGED], ids=lambda f: f.__name__)


def decided(
    function: Callable[..., Any], spec: Any, w: Any, x: Any, *, fill: bool, keep: bool = True
) -> tuple[Any, list[Any], list[Any], Inserter]:
    """Returns the traced function, its arguments, their decisions and the inserter."""
    inserter = Inserter(MESH, "data", keep=keep)
    closed = jax.make_jaxpr(function)(w, x)
    given = [Shard(inserter.constrain(w, spec), spec), x]
    how = gather_once.decide_kept(
        closed, given, gather_once.by_plan(given, inserter), inserter, RowDimensions(), fill=fill
    )
    return closed, given, how, inserter


def over_stack(function: Callable[..., Any], spec: Any, fill: bool) -> Callable[..., Any]:
    def run(w: Any, x: Any) -> Any:
        closed, given, how, inserter = decided(function, spec, w, x, fill=fill)
        return inserter(closed, gather_once.gather(given, how, inserter))

    return run


def arguments(length: int = LENGTH) -> tuple[Any, Any]:
    return np.ones((length, INTO, OUT), np.float32), np.ones((8, INTO), np.float32)


@pytest.mark.parametrize("spec", SPECS)
@FUNCTIONS
def test_stacks_are_gathered_in_the_order_that_loops_read(
    function: Callable[..., Any], spec: Any
) -> None:
    """Otherwise XLA would transpose the gathered stack, and hold it twice."""
    first = spec.index("data")
    order = (0, 1, 2) if function in UNCHANGED else (first, 0, 3 - first)
    jaxpr = jax.make_jaxpr(over_stack(function, spec, fill=False))(*arguments()).jaxpr
    found = gathers(without_unused(jaxpr))
    assert [move.shape for move in found] == [tuple((LENGTH, INTO, OUT)[i] for i in order)]


@FUNCTIONS
def test_the_first_loop_fills_a_stack(function: Callable[..., Any]) -> None:
    """Not in short loops, nor where parameters are dropped."""

    def is_filled(length: int = LENGTH, **options: Any) -> bool:
        given = arguments(length)
        (how, _) = decided(function, SPECS[0], *given, **{"fill": True} | options)[2]
        return how is not None and how.by_loop

    assert is_filled() == (function in FILLED)
    assert not is_filled(LENGTH - 1)
    assert not is_filled(keep=False)


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("spec", SPECS)
@FUNCTIONS
def test_a_stack_is_the_same(function: Callable[..., Any], spec: Any, fill: bool) -> None:
    assert exact.differing(over_stack(function, spec, fill), function, *arguments()) == []


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_no_stack_is_held_twice() -> None:
    """Two stacks of 16 layers at stage 2. The gradients are shards, but for the layer that is
    reduced behind; one is gathered ahead. XLA has either twice, as two iterations are one."""
    zero = zerojax.zero(stage=2, bf16=True, mesh=zerojax.topology("h100", 8))
    compiled: Any = large_layers.lowered(zero, 512, 16, rows=512, scan=True).compile()
    layer = 2 * 8 * 512**2
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < (1 + 1 / 8) * 16 * layer + 4 * layer
