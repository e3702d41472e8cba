"""What lies padded, or on a divided mesh, is an array of its shape for NumPy, JAX and optax."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import from_bytes, to_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.plan import layout
from zerojax.plan.stored import StoredArray, pad
from zerojax.train_state.bound import has_inner

VALUES = np.arange(100 * 200, dtype=np.float32).reshape(100, 200)


def padded(kind: str = "device") -> StoredArray:
    sharding = layout.sharding(zerojax.mesh(devices=7), (None, "data"), kind)
    return StoredArray(jax.device_put(pad(VALUES, (100, 203)), sharding), VALUES.shape)


def shared(kind: str = "device") -> StoredArray:
    """On a mesh of 2x2x2 devices, of which zerojax.mesh() knows nothing."""
    spec = ("data:(1)2", ("data:(2)2", "data:(4)2"))
    sharding = layout.sharding(zerojax.mesh(), spec, kind)
    return StoredArray(jax.device_put(VALUES, sharding), VALUES.shape)


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        jax.device_get,
        jnp.asarray,
        jax.jit(lambda x: x + 1),
        jax.grad(lambda x: jnp.sum(x**2)),
        lambda x: optax.tree.norm([x]),
        lambda x: (2 * x - x / 3) @ x.T,
        lambda x: x[3:5],
        lambda x: jax.vmap(jnp.max)(x),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: from_bytes({"x": VALUES}, to_bytes({"x": x}))["x"],
    ],
)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
@pytest.mark.parametrize("stored", [padded, shared])
def test_used_as_an_array(
    use: Callable[[Any], Any], stored: Callable[[str], StoredArray], kind: str
) -> None:
    expected, found = use(jnp.asarray(VALUES)), use(stored(kind))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


@pytest.mark.parametrize("stored", [padded, shared])
def test_mixes_with_arrays_on_the_mesh(stored: Callable[[], StoredArray]) -> None:
    x = stored()
    rows = np.ones((56, 100), np.float32)
    placed = jax.device_put(rows, NamedSharding(x.sharding.mesh, P("data")))
    np.testing.assert_allclose(placed @ x, rows @ VALUES, rtol=1e-5)
    found = jax.jit(lambda a, b: a @ b)(placed, x)
    assert found.sharding.spec == P("data")


def test_lies_on_the_mesh_itself() -> None:
    assert shared().sharding == NamedSharding(zerojax.mesh(), P(None, None))
    by_parts = layout.sharding(zerojax.mesh(), (("data:(4)2", "data:(1)4"), None))
    x = StoredArray(jax.device_put(VALUES[:80], by_parts), (80, 200))  # in another order
    assert x.sharding == NamedSharding(zerojax.mesh(), P("data", None))
    np.testing.assert_array_equal(x.gathered(), VALUES[:80])


def test_says_how_it_lies_and_what_jax_gets() -> None:
    """JAX takes no array in unequal shards, and reads an argument's ``sharding``."""
    x = padded()
    assert x.sharding == NamedSharding(zerojax.mesh(devices=7), P(None, None))
    assert x.stored.sharding == NamedSharding(zerojax.mesh(devices=7), P(None, "data"))
    assert jax.jit(lambda x: x)(x).sharding.is_equivalent_to(x.sharding, 2)
    with pytest.raises(ValueError, match="should evenly divide the shape"):
        jax.jit(lambda x: x, in_shardings=x.stored.sharding)(VALUES)


def test_looks_like_an_array() -> None:
    x = padded()
    assert (x.shape, x.ndim, x.size, x.nbytes) == ((100, 200), 2, 20000, 80000)
    assert jax.eval_shape(lambda x: x, x).shape == (100, 200)
    assert [s.data.shape for s in x.addressable_shards] == [(100, 29)] * 7
    assert repr(x) == "StoredArray(float32[100, 200], P(None, 'data') in shards of [100, 29])"
    x.delete()
    assert x.is_deleted()


@pytest.mark.parametrize("stored", [padded, shared])
def test_nothing_is_gathered_for_an_attribute_that_arrays_lack(
    stored: Callable[[str], StoredArray],
) -> None:
    """The step asks whether an argument is an optimizer's state, at each call."""

    class Refusing(StoredArray):
        def gathered(self) -> jax.Array:
            raise AssertionError("gathered")

    kept = stored("device")
    refusing = Refusing(kept.stored, kept.shape)
    assert not has_inner(refusing)
    assert not hasattr(refusing, "opt_state")
    assert kept.max() == VALUES.max()
