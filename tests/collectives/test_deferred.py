"""A layer's gradients are reduced in the next iteration, and are the same numbers."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collectives.test_prefetch import once, scanned
from jaxprs import equations

import zerojax
from zerojax.collectives import Inserter, Shard
from zerojax.collectives.prefetch import LEAST
from zerojax.devices.mesh import zero_axis
from zerojax.graph.rows import RowDimensions
from zerojax.xla import jaxprs

pytestmark = pytest.mark.usefixtures("quick_compile")

MESHES = {
    "one axis": zerojax.mesh(),
    "replica groups": zerojax.mesh(replicas=2),
    "tokens": zerojax.mesh(axes={"data": 4, "seq": 2}),
    "tokens in groups": zerojax.mesh(axes={"replica": 2, "data": 2, "seq": 2}),
}
N, ROWS, TOKENS, LAYERS = 16, 16, 4, LEAST
X = np.random.default_rng(1).normal(size=(ROWS, TOKENS, N))


def weights(name: str, layers: int = LAYERS) -> np.ndarray:
    layer = (N,) if name == "scaled" else (N, N)
    return np.random.default_rng(0).normal(size=(layers, *layer)) / 4


def flat(x: Any, w: Any) -> Any:
    """All tokens in one dimension."""
    return jnp.tanh(x.reshape(-1, N) @ w).reshape(x.shape)


def twice(x: Any, w: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ w) @ w.T)


CASES = {
    "once": scanned(once),
    "in reverse": scanned(once, reverse=True),
    "flat": scanned(flat),
    "transposed": scanned(lambda x, w: jnp.tanh(x @ w.T)),
    "scaled": scanned(lambda x, w: jnp.tanh(x * w)),
    "in a call": scanned(lambda x, w: jnp.tanh(jax.jit(jnp.matmul)(x, w))),
    "two uses": scanned(twice),
}
BEHIND = set(CASES) - {"two uses"}
OTHERS = [("one axis", True), ("replica groups", False), ("replica groups", True)]


def inserted(
    loss: Callable[..., Any], rows: int | None = 0, mesh: str = "one axis", keep: bool = False
) -> Callable[..., Any]:
    axis = zero_axis(MESHES[mesh])
    inserter = Inserter(MESHES[mesh], axis, keep=keep)

    def run(ws: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(jax.value_and_grad(loss))(ws, x)
        spec = (None, axis, None)[: ws.ndim]
        shard = Shard(inserter.constrain(ws, spec), spec)
        row_dims = RowDimensions.of_program(closed, [None, rows])
        return tuple(inserter(closed, [shard, x], want=(None, spec), rows=row_dims))

    return run


def parts(run: Callable[..., Any], ws: np.ndarray) -> list[bool]:
    """For each loop, whether it carries each device's part of a gradient."""
    jaxpr = jax.make_jaxpr(run)(ws, X)
    loops = [eqn for _, eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    bodies = [(next(jaxprs.inner(loop)), jaxprs.scan_parts(loop).carry) for loop in loops]
    return [
        any(v.aval.shape == (8, *ws.shape[1:]) for v in b.outvars[:carry]) for b, carry in bodies
    ]


EVERYWHERE = [
    *((name, mesh, keep) for name in ("flat", "scaled") for mesh, keep in OTHERS),
    *((name, "tokens", False) for name in ("once", "in reverse", "transposed", "scaled")),
    ("once", "tokens in groups", True),
]


CELLS = [*((name, "one axis", False) for name in CASES), *EVERYWHERE]


@pytest.mark.parametrize(("name", "mesh", "keep"), CELLS)
def test_what_is_inserted_is_an_identity(name: str, mesh: str, keep: bool) -> None:
    got = inserted(CASES[name], mesh=mesh, keep=keep)
    assert exact.differing(got, jax.value_and_grad(CASES[name]), weights(name), X) == []


@pytest.mark.parametrize("name", CASES)
def test_the_backward_loop_carries_parts(name: str) -> None:
    assert parts(inserted(CASES[name]), weights(name)) == [False, name in BEHIND]


@pytest.mark.parametrize(("name", "mesh", "keep"), EVERYWHERE)
def test_so_it_does_at_stage_2_in_groups_and_with_tokens_cut(
    name: str, mesh: str, keep: bool
) -> None:
    assert parts(inserted(CASES[name], mesh=mesh, keep=keep), weights(name)) == [False, True]


def test_not_where_rows_and_tokens_are_one_dimension_of_shared_tokens() -> None:
    assert not any(parts(inserted(CASES["flat"], mesh="tokens"), weights("flat")))


def test_not_in_short_loops_nor_without_rows() -> None:
    assert not any(parts(inserted(CASES["once"]), weights("once", LAYERS - 1)))
    assert not any(parts(inserted(CASES["once"], rows=None), weights("once")))
