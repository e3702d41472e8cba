"""The same calls for every implementation of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from pallas_kernels import compat, dispatch

_POISONED = 2**26
IMPLEMENTATIONS = ("xla", "mosaic_gpu")
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def run(implementation: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """``jit(function)(*arguments)``, for Mosaic on the GPU or, without one, in the simulator: with
    checks of races and bounds. Results hold NaN before they are written."""
    if implementation == "xla":
        return jax.block_until_ready(jax.jit(function)(*arguments))
    if dispatch.target().platform == "gpu":
        # What is freed here is what results are allocated from.
        jnp.full(_POISONED, jnp.nan).block_until_ready().delete()
        return jax.block_until_ready(jax.jit(function)(*arguments))
    with compat.simulator():
        return jax.block_until_ready(jax.jit(function)(*arguments))


def with_gradients(
    implementation: str, function: Callable[..., Any], cotangents: Any, *arguments: Any
) -> Any:
    """``function(*arguments)`` as :func:`run` has it, and the gradients of its arguments."""

    def both(cotangents: Any, *arguments: Any) -> Any:
        y, vjp = jax.vjp(function, *arguments)
        return y, vjp(cotangents)

    return run(implementation, both, cotangents, *arguments)


def compiled_for_h100(
    function: Callable[..., Any], *arguments: Any, devices: int, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compiled for that many H100s which are not there, each with the arguments' shapes."""
    mesh = zerojax.topology("h100", devices=devices)
    spec = PartitionSpec("data")

    def over_all(x: Any) -> jax.ShapeDtypeStruct:
        shape = (devices * x.shape[0], *x.shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jitted = jax.jit(mapped, donate_argnums=donate)
    return jitted.lower(*jax.tree.map(over_all, arguments)).compile()


def random(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    """Normal numbers, none near zero, so that what is lost cannot pass for what is there."""
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(np.where(np.abs(x) < 0.05, 0.05, x), dtype)


def assert_close(got: Any, wanted: Any, dtype: Any, scale: float = 1.0) -> None:
    """Within a few units in the last place of a dtype, of values around ``scale``; ``wanted`` is
    float64."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got, wanted, rtol=4 * eps + 2e-6, atol=(4 * eps + 2e-6) * scale)
