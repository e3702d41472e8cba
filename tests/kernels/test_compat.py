"""The simulator sees what would go wrong on a GPU; it is not exported by every version of jax."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, tiles


def launched(body: Callable[..., None], x: jax.Array) -> jax.Array:
    with compat.simulator():
        (made,) = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
            grid=(2,),
            grid_names=("block",),
            compiler_params=tiles.params(),
        )(x)
        return jax.block_until_ready(made)


X = jnp.arange(256.0)


def test_a_kernel() -> None:
    def body(x: Any, y: Any) -> None:
        at = pl.ds(lax.axis_index("block") * 128, 128)
        y[at] = x[at] + 1

    np.testing.assert_array_equal(launched(body, X), X + 1)
    assert not compat.simulated()


def test_what_no_thread_writes_is_nan() -> None:
    def body(x: Any, y: Any) -> None:
        @pl.when(lax.axis_index("block") == 1)
        def _() -> None:
            y[pl.ds(128, 128)] = x[pl.ds(0, 128)]

    made = launched(body, X)
    assert np.isnan(made[:128]).all()
    assert not np.isnan(made[128:]).any()


def test_reads_beyond_the_end_are_errors() -> None:
    def body(x: Any, y: Any) -> None:
        at = pl.ds(lax.axis_index("block") * 128, 128)
        y[at] = x[pl.ds(lax.axis_index("block") * 200, 128)]

    with pytest.raises(Exception, match=r"[Oo]ut-of-bounds|out of bounds"):
        launched(body, X)
