"""Parameters that are gathered once a step: the dtype, and what is computed from the copies."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import Move, gathers

import zerojax
from zerojax.collectives import Inserter, Shard, kept

pytestmark = pytest.mark.usefixtures("quick_compile")

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
        how = kept.decide(closed, args, kept.by_plan(args, inserter), inserter, fill=False)
        given, _ = kept.gather(args, how, inserter)
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
