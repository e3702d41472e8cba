"""The global norm, from the sums of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.optim.norm import global_norm, norm_of, square_sums

pytestmark = pytest.mark.usefixtures("quick_compile")


def normal(*shape: int) -> jax.Array:
    values = np.random.default_rng(sum(shape)).normal(size=shape)
    return jnp.asarray(values, jnp.float32)


@pytest.mark.parametrize("shape", [(), (5,), (5, 3), (2, 3, 4, 5), (0, 3)])
def test_sums_of_rows(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    want = np.square(np.asarray(x)).sum(tuple(range(1, x.ndim)))
    assert square_sums(x).shape == shape[:1]
    np.testing.assert_allclose(square_sums(x), want, rtol=1e-6)


def test_it_is_optaxs() -> None:
    tree = {"a": normal(8, 16), "b": [normal(3), jnp.asarray(2.0)], "c": normal(2, 3, 4)}
    np.testing.assert_allclose(global_norm(tree), optax.tree.norm(tree), rtol=1e-6)
    sums = [square_sums(x) for x in jax.tree.leaves(tree)]
    np.testing.assert_array_equal(norm_of(sums), global_norm(tree))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_spoils_it(bad: float) -> None:
    x = normal(8, 16).at[3, 5].set(bad)
    assert not np.isfinite(global_norm({"fine": normal(3), "x": x}))
