"""What an equation does with shards, as data: nothing runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from collectives.test_carried_sums import MESH, weight
from jax import lax

from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.uses import Kind, Uses, use_of
from zerojax.graph.rows import RowDimensions
from zerojax.plan.layout import Spec

N = 128
ROWS: Spec = ("data", None)
COLUMNS: Spec = (None, "data")


def used(function: Callable[..., Any], *specs: Spec | None, mixes: bool = True) -> tuple[Any, ...]:
    jaxpr = jax.make_jaxpr(function)(*(weight(N, N) for _ in specs))
    operands = dict(zip(jaxpr.jaxpr.invars, specs, strict=True))
    eqn = jaxpr.jaxpr.eqns[-1]
    given = [operands.get(v) if not hasattr(v, "val") else None for v in eqn.invars]
    return use_of(eqn, given, MESH, "data", mixes=mixes)


@pytest.mark.parametrize(
    ("function", "specs", "kind", "spec"),
    [
        (jnp.tanh, [ROWS], Kind.ON_SHARDS, ROWS),
        (lambda x: x.T, [ROWS], Kind.ON_SHARDS, COLUMNS),
        (lambda x: x.astype("bfloat16"), [COLUMNS], Kind.ON_SHARDS, COLUMNS),
        (lambda x, y: x + y, [ROWS, ROWS], Kind.ON_SHARDS, ROWS),
        (lambda x, y: x + y, [ROWS, None], Kind.ON_SHARDS, ROWS),
        (lambda x, y: x + y, [ROWS, COLUMNS], Kind.UNSHARDED, ()),
        (lambda x, y: lax.concatenate([x, y], 1), [ROWS, ROWS], Kind.ON_SHARDS, ROWS),
        (lambda x, y: lax.concatenate([x, y], 0), [ROWS, ROWS], Kind.UNSHARDED, ()),
        (lambda x: x.sum(0), [ROWS], Kind.REDUCED, ()),
        (lambda x, y: jnp.tensordot(x, y), [ROWS, ROWS], Kind.REDUCED, ()),
        (lambda x, y: x @ y, [None, ROWS], Kind.UNSHARDED, ()),
        (lambda x: lax.slice(x, (0, 0), (N, 2)), [ROWS], Kind.ON_SHARDS, ROWS),
        (lambda x: lax.slice(x, (0, 0), (2, N)), [ROWS], Kind.UNSHARDED, ()),
        (lambda x: lax.optimization_barrier(x), [ROWS], Kind.UNCHANGED, ()),
    ],
)
def test_kinds(
    function: Callable[..., Any], specs: Sequence[Spec | None], kind: Kind, spec: Spec
) -> None:
    assert used(function, *specs)[:2] == (kind, spec)


def test_lanes_do_not_mix_shards_with_their_own_values() -> None:
    assert used(lambda x, y: x + y, ROWS, None, mixes=False).kind is Kind.UNSHARDED
    assert used(lambda x, y: x + y, ROWS, ROWS, mixes=True).kind is Kind.ON_SHARDS


def dtypes(function: Callable[..., Any], **question: Any) -> set[str]:
    """The dtypes in which a function of a matrix and activations needs the matrix unsharded."""
    closed = jax.make_jaxpr(function)(weight(N, N), weight(8, N))
    uses = Uses(Gatherer(MESH, "data", keep=False), RowDimensions(), **question)
    found = uses.dtypes(closed.jaxpr, closed.jaxpr.invars[0], ROWS)
    return {dtype.name for dtype in found}


def test_dtypes_of_a_program() -> None:
    def half(w: Any, x: Any) -> Any:
        return x.astype("bfloat16") @ w.astype("bfloat16").T

    assert dtypes(lambda w, x: x @ w) == {"float32"}
    assert dtypes(half) == {"bfloat16"}
    assert dtypes(jax.jit(half)) == {"bfloat16"}
    assert dtypes(lambda w, x: (x @ w, half(w, x))) == {"float32", "bfloat16"}
    assert dtypes(lambda w, x: (w * 2, (w * w).sum(), x)) == set()


def test_what_may_stay_sharded_is_left_out() -> None:
    def branch(w: Any, x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)

    assert dtypes(branch) == {"float32"}
    assert dtypes(branch, surely=True) == set()
    assert dtypes(lambda w, x: lax.concatenate([w, x], 0), surely=True) == set()


def test_a_constant_of_a_loop_is_needed_where_each_iteration_computes_from_all_of_it() -> None:
    assert dtypes(lambda w, x: x @ jnp.tanh(w)) == set()  # the tanh is gathered in its place
    assert dtypes(lambda w, x: x @ jnp.tanh(w), varies={}) == {"float32"}
