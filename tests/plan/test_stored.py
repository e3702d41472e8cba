"""Padded arrays are arrays of their own shape, for NumPy, JAX and optax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.plan import layout
from zerojax.plan.stored import StoredArray, pad

VALUES = np.arange(100 * 200, dtype=np.float32).reshape(100, 200)


def padded(kind: str = "device") -> StoredArray:
    sharding = layout.sharding(zerojax.mesh(devices=7), (None, "data"), kind)
    return StoredArray(jax.device_put(pad(VALUES, (100, 203)), sharding), VALUES.shape)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        jax.device_get,
        jnp.asarray,
        jax.jit(lambda x: x + 1),
        jax.grad(lambda x: jnp.sum(x**2)),
        lambda x: optax.tree.norm([x]),
        lambda x: jnp.dot(np.ones((3, 100), np.float32), x),
        lambda x: (2 * x - x / 3) @ x.T,
        lambda x: x.astype(jnp.bfloat16).mean(axis=0),
        lambda x: x[3:5],
        lambda x: jax.device_put(x, jax.devices()[0]),
        lambda x: jax.vmap(jnp.max)(x),
    ],
)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_used_as_an_array(use: Callable[[Any], Any], kind: str) -> None:
    expected, found = use(jnp.asarray(VALUES)), use(padded(kind))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


def test_looks_like_an_array() -> None:
    x = padded()
    assert (x.shape, x.ndim, x.size, x.nbytes) == ((100, 200), 2, 20000, 80000)
    assert jax.eval_shape(lambda x: x, x).shape == (100, 200)
    assert [s.data.shape for s in x.addressable_shards] == [(100, 29)] * 7
    assert repr(x) == "StoredArray(float32[100, 200], in pieces of [100, 29])"
    x.delete()
    assert x.is_deleted()
