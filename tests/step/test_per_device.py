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


def test_what_does_not_divide() -> None:
    over = zerojax.zero(stage=0).per_device(scaled, replicated=[1])
    with pytest.raises(
        ValueError, match=r"per_device\(scaled\): argument 0\['rows'\] has shape \(3"
    ):
        over({"rows": X[:3]}, W)
    with pytest.raises(ValueError, match="Make it a multiple, or add 0 to replicated"):
        over({"rows": jnp.float32(1)}, W)


def test_a_dimension_cut_over_an_axis_of_the_users() -> None:
    """Heads [B, T, H, d] over "model", ids [B, T] by rows alone, a replicated scale."""
    mesh = zerojax.mesh(axes={"data": 4, "model": 2})
    x = np.random.default_rng(1).normal(size=(8, 3, 6, 2)).astype(np.float32)
    ids = np.arange(24).reshape(8, 3).astype(np.int32)

    def local(x: Any, ids: Any, w: Any) -> Any:
        assert (x.shape, ids.shape) == ((2, 3, 3, 2), (2, 3))
        return jnp.tanh(x * w) + ids[..., None, None]

    over = zerojax.zero(stage=0, mesh=mesh).per_device(local, replicated=[2], sharded={"model": 2})

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(over(x, ids, w) ** 2)

    def plain(x: Any, w: Any) -> Any:
        return jnp.sum((jnp.tanh(x * w) + ids[..., None, None]) ** 2)

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, W[:2]) for f in (loss, plain))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ValueError,
        match=r"\(8, 3, 5, 2\), and the 2 devices of model do not divide",
    ):
        over(x[:, :, :5], ids, W[:2])
    for axis in ("data", "heads"):
        with pytest.raises(ValueError, match=f"sharded names '{axis}'. Name an axis"):
            zerojax.zero(stage=0, mesh=mesh).per_device(local, sharded={axis: 2})
    for at in (0, -1, True):
        with pytest.raises(ValueError, match=r"sharded has 'model': .* 1 or more"):
            zerojax.zero(stage=0, mesh=mesh).per_device(local, sharded={"model": at})
    mesh = zerojax.mesh(axes={"data": 2, "model": 2, "rows": 2})
    with pytest.raises(ValueError, match=r"sharded has 'rows': 2\. Give each axis"):
        zerojax.zero(stage=0, mesh=mesh).per_device(local, sharded={"model": 2, "rows": 2})
