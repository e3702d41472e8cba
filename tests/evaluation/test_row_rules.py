"""Which equations take each row for itself: rules of accumulation, held to what shapes say."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.evaluation.row_kinds import RowKind, TwoTraces
from zerojax.evaluation.row_rules import Sizes, Undivided
from zerojax.xla import jaxprs

WIDE = np.ones((5, 5), np.float32)
AT = np.array([3, 1])

BY_ROWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elementwise": lambda x: jnp.tanh(x) * 2,
    "broadcast": lambda x: x[:, None] + x[:, :, None],
    "transposed": lambda x: x.T,
    "merged with what each row has": lambda x: x[:, :4].reshape(-1),
    "product": lambda x: x @ WIDE,
    "product of each row with itself": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "sum of each row": lambda x: x.sum(1),
    "largest of each row": lambda x: x.argmax(1),
    "sorted, each row": lambda x: jnp.sort(x, 1),
    "reversed, each row": lambda x: x[:, ::-1],
    "padded, each row": lambda x: jnp.pad(x, ((0, 0), (1, 1))),
    "sums along each row": lambda x: jnp.cumsum(x, 1),
    "beside each other": lambda x: jnp.concatenate([x, x], 1),
    "columns": lambda x: x[:, AT],
    "its own column": lambda x: jnp.take_along_axis(x, x.astype(int).argmin(1)[:, None], 1),
    "rows of a table": lambda x: jnp.asarray(WIDE)[x[:, 0].astype(int)],
    "pooled, each row": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"),
    "the largest of each row": lambda x: lax.top_k(x, 2)[0],
    "decomposed, each row": lambda x: jnp.linalg.cholesky(
        jnp.einsum("bi,bj->bij", x, x) + 9 * np.eye(5, dtype=np.float32)
    ),
}

ROWS_MEET: dict[str, Callable[[jax.Array], jax.Array]] = {
    "reversed": lambda x: x[::-1],
    "every other one": lambda x: jnp.repeat(x, 2, 0)[::2],
    "rolled": lambda x: jnp.concatenate([x[-1:], x[:-1]]),
    "twice": lambda x: jnp.concatenate([x, x]),
    "sums along the rows": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "merged, rows inside": lambda x: x.T.reshape(-1),
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "the rows of others": lambda x: x[x[:, 0].astype(int)],
    "numbered": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "pooled": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "products of rows": lambda x: (x @ x.T) @ x,
    "shifted": lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
}


def classify(function: Callable[[jax.Array], jax.Array]) -> list[RowKind]:
    """The kinds of the results of a function of six rows, of which two run at a time."""
    programs = [
        jaxprs.open_jaxpr(
            jaxprs.without_calls(jax.make_jaxpr(function)(jnp.ones((rows, 5), jnp.float32)))
        )[0]
        for rows in (6, 2)
    ]
    traced = TwoTraces(*programs, Sizes(6, 2))
    traced.classify([RowKind.ROWS])
    return [traced.kind(v) for v in traced.whole.outvars]


@pytest.mark.parametrize("name", BY_ROWS)
def test_each_row_for_itself(name: str) -> None:
    assert classify(BY_ROWS[name]) == [RowKind.ROWS]


@pytest.mark.parametrize("name", ROWS_MEET)
def test_rows_that_meet_are_not_divided(name: str) -> None:
    with pytest.raises(Undivided):
        classify(ROWS_MEET[name])


@pytest.mark.parametrize("function", [jnp.sum, jnp.max, lambda x: x.sum(0), lambda x: x.T @ x])
def test_reductions_over_rows(function: Callable[[jax.Array], jax.Array]) -> None:
    assert classify(function) == [RowKind.TOTAL]
