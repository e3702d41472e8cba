"""Functions of a batch by parts of its rows: which divide, and their numbers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.accumulation.symbolic import TracedRows
from zerojax.evaluation.rows import ByRows, PartPrograms, TracedFunction
from zerojax.evaluation.undivided import Undivided

WIDE = np.ones((5, 5), np.float32)
Sizes = tuple[int, int]
"""Rows of the batch and of a part."""
EVEN, PADDED, ALONE = (6, 2), (6, 4), (6, 1)
SIZES = [EVEN, PADDED, ALONE, (3, 8)]

BY_ROWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elementwise": lambda x: jnp.tanh(x) * 2,
    "merged with what each row has": lambda x: x[:, :4].reshape(-1),
    "product of each row with itself": lambda x: jnp.einsum("bi,bj->bij", x, x),
    "sum of each row": lambda x: x.sum(1),
    "beside each other": lambda x: jnp.concatenate([x, x], 1),
    "its own column": lambda x: jnp.take_along_axis(x, x.astype(int).argmin(1)[:, None], 1),
    "rows of a table": lambda x: jnp.asarray(WIDE)[x[:, 0].astype(int)],
    "pooled, each row": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 1), "VALID"),
    "its own column, by number": lambda x: x[jnp.arange(len(x)), x.astype(int).argmin(1)],
    "decomposed, each row": lambda x: jnp.linalg.cholesky(
        jnp.einsum("bi,bj->bij", x, x) + 9 * np.eye(5, dtype=np.float32)
    ),
}

ROWS_MEET: dict[str, Callable[[jax.Array], jax.Array]] = {
    "reversed": lambda x: x[::-1],
    "in another order": lambda x: x[jnp.asarray([*range(5), -1])[jnp.arange(len(x)) % 6]],
    "merged, rows inside": lambda x: x.T.reshape(-1),
    "the rows of others": lambda x: x[x[:, 0].astype(int)],
    "numbered": lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 0),
    "pooled": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "shifted": lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
}


REDUCED: dict[str, Callable[[jax.Array], Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "largest": jnp.max,
    "product of all": jnp.prod,
    "product of two": lambda x: jnp.prod(x, 0) * jnp.prod(x + 1, 0),
    "largest integer": lambda x: x.astype(jnp.int8).max(),
    "any": lambda x: (x > 2).any(0),
    "bits of all": lambda x: jnp.bitwise_and.reduce(x.astype(int) | 6),
    "squares": lambda x: x.T @ x,
    "merged, rows inside": lambda x: x.T.reshape(-1).sum(),
    "how many": lambda x: jnp.ones(len(x)).sum(),
    "counts": lambda x: jnp.zeros(3, int).at[x[:, 0].astype(int) % 3].add(1),
    "counts on others": lambda x: jnp.arange(3).at[x[:, 0].astype(int) % 3].add(1),
    "a kernel's gradient": lambda x: jax.grad(
        lambda w: (lax.conv(x[:, None], w, (1,), "SAME") ** 2).sum()
    )(jnp.ones((2, 1, 3))),
    "what a mean is used for": lambda x: jnp.exp(x.mean(0)) @ WIDE,
    "as often as there are rows": lambda x: lax.fori_loop(0, len(x), lambda i, c: 2 * c, x.sum()),
    "with a number for the rows": lambda x: (
        x * lax.fori_loop(0, len(x), lambda i, c: 1.5 * c, 1.0) / len(x) ** 2
    ).sum(),
}  # fmt: skip


def divided(
    function: Callable[[jax.Array], Any], sizes: Sizes, padded: bool | None = None, **more: Any
) -> tuple[PartPrograms, Any]:
    """A function of rows of five, and its jaxpr."""

    def trace(rows: int) -> TracedFunction:
        closed, out = jax.make_jaxpr(function, return_shape=True)(jnp.ones((rows, 5), jnp.float32))
        return TracedFunction(closed, [True], jax.tree.structure(out))

    n, part = sizes
    padded = bool(n % part) if padded is None else padded
    rows = TracedRows(n, max(part, 2))
    full, other = map(trace, rows.traced)
    return ByRows(full, other, rows, padded=padded, **more)(part), full.closed


def check(function: Callable[[jax.Array], Any], sizes: Sizes, *, stacked: bool) -> None:
    """Holds a function by parts, the last filled up with copies, to the function itself."""
    by_rows, full = divided(function, sizes)
    assert by_rows.stacked == ([0] if stacked else [])
    n, part = sizes
    x = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
    places = np.arange(-(-n // part) * part).reshape(part, -1).T  # of each part, not neighbours

    def run(x: jax.Array) -> list[jax.Array]:
        totals, rows = by_rows.zeros(), []
        for at in places:
            counts = jnp.asarray(at < n) if n % part else None
            more, own = by_rows.part([x[np.minimum(at, n - 1)]], counts)
            totals = by_rows.add(totals, more)
            rows.append(own)
        order = places.reshape(-1).argsort()[:n]
        stacked = [jnp.concatenate(own)[order] for own in zip(*rows, strict=True)]
        return by_rows.finish([None], totals, stacked)

    got, want = jax.jit(run)(x), jax.jit(jax.extend.core.jaxpr_as_fun(full))(x)
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, 2e-5, 2e-5)


@pytest.mark.parametrize("name", [*BY_ROWS, *REDUCED])
def test_divided(name: str) -> None:
    by_rows, _ = divided((BY_ROWS | REDUCED)[name], PADDED)
    assert by_rows.stacked == ([0] if name in BY_ROWS else [])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", BY_ROWS)
def test_each_row_for_itself(name: str, sizes: Sizes) -> None:
    check(BY_ROWS[name], sizes, stacked=True)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", REDUCED)
def test_reductions(name: str, sizes: Sizes) -> None:
    check(REDUCED[name], sizes, stacked=False)


@pytest.mark.parametrize("sizes", [EVEN, PADDED, ALONE])
@pytest.mark.parametrize("name", ROWS_MEET)
def test_rows_that_meet_are_not_divided(name: str, sizes: Sizes) -> None:
    with pytest.raises(Undivided):
        divided(ROWS_MEET[name], sizes)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x - x.mean(0), "its sub takes rows together with a result of all rows"),
        (lambda x: jnp.ones(len(x) ** 2).sum() + x, r"array of shape \(36,\) of 6 rows"),
        (lambda x: x * np.arange(1.0, len(x) + 1)[:, None], "a constant with an entry for each"),
        (lambda x: jnp.sin(x) if len(x) == 6 else jnp.cos(x), "its sin depends on the number"),
        (lambda x: lax.scan(lambda c, y: (c * y[0], c), 1.0, x), "its .* runs over the rows"),
        (lambda x: lax.while_loop(lambda c: c.sum() > 9, lambda c: c / 2, x), "inside while"),
        (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), "its random_bits brings"),
        (lambda x: jax.pure_callback(lambda x: x, x, x), "its pure_callback brings"),
        (lambda x: jax.debug.print("{}", x), "prints, or calls back"),
    ],
)
def test_the_reason(function: Any, says: str) -> None:
    with pytest.raises(Undivided, match=says):
        divided(function, EVEN)


def doubled(x: jax.Array) -> jax.Array:
    """With derivatives of its own."""
    own = jax.custom_vjp(lambda x: 2 * x)
    own.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
    return own(x)


@jax.custom_vjp
def averaged(x: jax.Array) -> jax.Array:
    """With the number of rows within a function that has derivatives of its own."""
    return x / (x.shape[0] + 1)


averaged.defvjp(lambda x: (x / (x.shape[0] + 1), None), lambda _, g: (g,))


class TestDifferentiated:
    """Functions that are differentiated afterwards keep checkpoints and rules."""

    def gradient(self, function: Any, sizes: Sizes) -> tuple[Any, Any]:
        by_rows, _ = divided(function, sizes, padded=True, differentiated=True)
        n, part = sizes
        x = np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32)
        at, counts = np.minimum(np.arange(part), n - 1), jnp.arange(part) < n

        def run(x: jax.Array) -> jax.Array:
            totals, _ = by_rows.part([x[at]], counts)
            return by_rows.finish([None], totals, [])[0]

        return jax.grad(run)(x), jax.grad(function)(x)

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (doubled(x) ** 2).mean(),
            lambda x: jax.nn.softplus(jax.checkpoint(jnp.sin)(x)).mean(),
            lambda x: x.max() + x.sum(),
            lambda x: jnp.log((x**2).sum()),
        ],
    )
    def test_gradients(self, function: Any) -> None:
        np.testing.assert_allclose(*self.gradient(function, (5, 8)), 1e-5, 1e-6)

    @pytest.mark.parametrize("inside", [False, True])
    def test_numbers_of_rows_within_a_rule(self, inside: bool) -> None:
        def function(x: jax.Array) -> jax.Array:
            return (jax.checkpoint(averaged) if inside else averaged)(x).sum()

        check(function, EVEN, stacked=False)
        with pytest.raises(Undivided, match="depends on the number of rows"):
            divided(function, EVEN, differentiated=True)


def test_sums_within_a_loop() -> None:
    """Rows that do not count are not told apart there."""

    def function(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, y: (c + (x * y).sum(), None), 0.0, jnp.arange(3.0))[0]

    check(function, EVEN, stacked=False)
    with pytest.raises(Undivided, match="its reduce_sum brings rows together inside scan"):
        divided(function, PADDED)


def test_a_loop_over_the_rows() -> None:
    check(lambda x: lax.map(lambda row: row.sum() * row, x), PADDED, stacked=True)
    total: Any = lambda x: lax.scan(lambda c, row: (c + row.max(), None), 0.0, x)[0]  # noqa: E731
    check(total, EVEN, stacked=False)
    with pytest.raises(Undivided, match="its scan runs over the rows"):
        divided(total, PADDED)
