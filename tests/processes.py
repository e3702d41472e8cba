"""Several processes that are one job of JAX's, on the CPU."""

from collections.abc import Callable
from typing import Any

import jax


def joined(task: Callable[..., Any], process: int, count: int, port: int, *arguments: Any) -> Any:
    """Runs ``task`` as one of several processes, which share eight devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=300)
    try:
        return task(process, *arguments)
    finally:
        jax.distributed.shutdown()
