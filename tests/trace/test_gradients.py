"""value_and_grad and grad are jax's where there is no scale; weighted means."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zerojax


def f(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(x) * y)


X, Y = jnp.arange(3.0), jnp.arange(3.0) + 1


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), -1])
@pytest.mark.parametrize("has_aux", [False, True])
def test_the_same_as_jax(argnums: Any, has_aux: bool) -> None:
    def fun(x: jax.Array, y: jax.Array) -> Any:
        return (f(x, y), {"x": x}) if has_aux else f(x, y)

    for mine, its in ((zerojax.value_and_grad, jax.value_and_grad), (zerojax.grad, jax.grad)):
        got = jax.jit(mine(fun, argnums, has_aux=has_aux))(X, Y)
        want = its(fun, argnums, has_aux=has_aux)(X, Y)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_nnx_modules() -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x).sum()

    value, grads = zerojax.value_and_grad(loss, loss_scale=4.0)(model, X)
    want_value, want = nnx.value_and_grad(loss)(model, X)
    np.testing.assert_array_equal(value, want_value)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 4 * b), grads, want)


def test_the_scaled_loss_is_in_float32() -> None:
    """In fp16 the product of loss and scale would overflow, not only the gradient."""
    value, grad = zerojax.value_and_grad(lambda w: w * 3, loss_scale=2.0**14)(jnp.float16(2))
    assert (float(value), float(grad)) == (6.0, 3 * 2.0**14)


def test_weighted_mean() -> None:
    values = jnp.array([[1.0, jnp.nan], [3.0, 5.0]], jnp.float16)
    mask = jnp.array([[1, 0], [1, 2]])
    assert float(zerojax.weighted_mean(values, mask)) == 3.5
    assert zerojax.weighted_mean(values, mask).dtype == jnp.float32
    assert float(zerojax.weighted_mean(values, 0 * mask)) == 0.0
    assert np.isfinite(jax.grad(zerojax.weighted_mean)(values, 0 * mask)).all()
    assert float(zerojax.weighted_mean(jnp.float32(2.5), 100)) == 2.5


@pytest.mark.parametrize("shape", [(2,), (3, 3), (1, 2, 3)])
def test_weights_that_do_not_fit_the_values(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"weights .* do not broadcast to"):
        zerojax.weighted_mean(jnp.ones((2, 3)), jnp.ones(shape))
