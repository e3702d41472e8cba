"""Seconds of calls of the kernels on the GPU at hand, and of a copy beside them."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Measured

_WARM_UP, _ROUNDS = 3, 20
_ROUND_SECONDS, _MOST = 0.02, 200


def timed(call: Measured, compiled: Callable[..., Any]) -> float:
    """Seconds of a call."""
    arguments = jax.tree.map(random_like, call.arguments)
    return median_seconds(lambda: compiled(*arguments), jax.block_until_ready)


def timed_peer(call: Callable[[], object]) -> float:
    """Seconds of a call of torch's on the GPU."""
    torch: Any = importlib.import_module("torch")
    return median_seconds(call, lambda _: torch.cuda.synchronize())


def copy_rate(elements: int = 2**28) -> float:
    """Bytes a second that a plain copy of fp32 reads and writes."""
    x = jnp.zeros(elements, jnp.float32)
    copy = jax.jit(jnp.copy)
    return 2 * x.nbytes / median_seconds(lambda: copy(x), jax.block_until_ready)


def median_seconds(
    call: Callable[[], object], wait: Callable[[Any], object], rounds: int = _ROUNDS
) -> float:
    """Seconds of a call, the median over rounds of many calls without waiting between them.

    The GPU has its next call before it is done with one, which hides the host's time. Some calls
    before do not count; the shortest of these determines the number of calls in a round."""

    def round_of(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            results = call()
        wait(results)
        return (time.perf_counter() - begin) / calls

    once = min(round_of(1) for _ in range(_WARM_UP))
    calls = max(1, min(_MOST, int(_ROUND_SECONDS / once)))
    return statistics.median(round_of(calls) for _ in range(rounds))


def random_like(x: Any) -> jax.Array:
    """Random numbers, equal for all arrays of a shape and a dtype."""
    key = jax.random.key(x.size % 9973)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.uniform(key, x.shape, jnp.float32, 0.05, 1).astype(x.dtype)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return key
    return jax.random.randint(key, x.shape, 0, 100).astype(x.dtype)
