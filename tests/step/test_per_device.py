"""A function that each device runs on its own rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
W = np.arange(1.0, 5.0, dtype=np.float32)


def scaled(x: Any, w: Any) -> Any:
    assert x["rows"].shape[0] == 2  # of 16, on 8 devices
    return {"rows": jnp.tanh(x["rows"] * w)}


def test_it_computes_the_same_and_its_gradient() -> None:
    over = zerojax.zero(stage=0).per_device(scaled, whole=[1])

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(over({"rows": x}, w)["rows"] ** 2)

    def plain(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(x * w) ** 2)

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(X, W)
    want, want_grads = jax.value_and_grad(plain, (0, 1))(X, W)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for got, wanted in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_what_does_not_divide() -> None:
    over = zerojax.zero(stage=0).per_device(scaled, whole=[1])
    with pytest.raises(
        ValueError, match=r"per_device\(scaled\): argument 0\['rows'\] has shape \(3"
    ):
        over({"rows": X[:3]}, W)
    with pytest.raises(ValueError, match="make it a multiple, or add 0 to `whole`"):
        over({"rows": jnp.float32(1)}, W)
