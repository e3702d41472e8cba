"""A gradient made with padding is the gradient, and lookups that padding would change have no
rule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.collectives.gradients import bind_padded, padded_operands
from zerojax.xla import jaxprs

pytestmark = pytest.mark.usefixtures("in_float64")

X = np.random.default_rng(0).normal(size=(6, 10))
PAIRS = np.stack([X, X**2], -1)
IDS = np.array([0, 9, 4, -3, 12, 7])  # negative ones count from the end; 12 is beyond it
WINDOW = lax.GatherDimensionNumbers(
    offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)
)


def windows(table: Any) -> Any:
    """Windows of 3 rows, of which the last does not fit into the table."""
    return lax.gather(table, np.array([[0], [5], [8]]), WINDOW, (3, 7), mode="fill", fill_value=0)


def along(w: Any) -> Any:
    return jnp.take_along_axis(w, IDS[:, None] % 7, 1)


def tables(w: Any) -> Any:
    return jax.vmap(lambda table, ids: table[ids])(w, IDS[:, None] % 7)


# A use of a parameter; its shape; how long its sharded dimensions are with padding; whether its
# gradient has a rule.
USES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], dict[int, int], bool]] = {
    "product": (lambda w: X @ w, (10, 7), {10: 12, 7: 9}, True),
    "product of a batch": (
        lambda w: jnp.einsum("bei,eij->bej", PAIRS, w), (10, 2, 7), {10: 12, 2: 3, 7: 9}, True,
    ),
    "sum": (lambda w: X + w, (10,), {10: 12}, True),
    "rows": (lambda w: w[IDS], (10, 7), {10: 12, 7: 9}, True),
    "filled rows": (lambda w: w.at[IDS].get(mode="fill", fill_value=0), (10, 7), {10: 12}, True),
    "clipped rows": (lambda w: w.at[IDS].get(mode="clip"), (10, 7), {10: 12}, False),
    "columns": (lambda w: w[:, abs(IDS) % 7], (10, 7), {10: 12, 7: 9}, True),
    "columns in part": (lambda w: w[IDS, :3], (10, 7), {10: 12}, True),
    "columns in part, padded": (lambda w: w[IDS, :3], (10, 7), {7: 9}, False),
    "windows": (windows, (10, 7), {7: 9}, True),
    "windows, padded": (windows, (10, 7), {10: 12}, False),
    "along": (along, (6, 7), {7: 9}, True),
    "along, padded": (along, (6, 7), {6: 8}, False),
    "tables": (tables, (6, 7, 3), {7: 9, 3: 4}, True),
    "tables, padded": (tables, (6, 7, 3), {6: 8}, False),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_padding_takes_no_part(name: str) -> None:
    use, shape, longer, has_rule = USES[name]
    w = np.random.default_rng(1).normal(size=shape)
    has: dict[str, bool] = {}

    def run(eqn: Any, values: list[Any]) -> Any:
        outs = jaxprs.bind(eqn, values)
        kind = eqn.primitive.name
        if kind in ("dot_general", "reduce_sum", "scatter-add") and (
            sorted(outs[0].shape) == sorted(shape)
        ):
            padded = tuple(longer.get(n, n) for n in outs[0].shape)
            shapes = padded_operands(eqn, padded)
            has[kind] = shapes is not None
            if shapes is not None:
                got = bind_padded(eqn, values, shapes)
                assert got.shape == padded
                cut = got[tuple(map(slice, outs[0].shape))]
                np.testing.assert_allclose(cut, outs[0], rtol=1e-12)
        return outs

    jaxprs.evaluate(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(jnp.sin(use(w)))))(w), [w], run)
    assert [*has.values()] == [has_rule]
