"""Several processes that are one job of JAX's, on the CPU.

A fork server that has imported JAX and zerojax starts them, as each import takes seconds.
"""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import jax
import pytest
from tiers import cpu_seconds


def fork_server() -> ForkServerContext:
    """Returns the context whose processes have imported ``preloaded``; starts its server once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        # What the processes free goes back to the system at once: their peak is of what they held.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "500000")
        # The server finds modules by this variable alone.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def take_environment(environment: Mapping[str, str]) -> None:
    """Gives this process the variables of the one that asked for it, and JAX what follows."""
    os.environ.clear()
    os.environ.update(environment)
    quick = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", quick)


def joined(
    task: Callable[..., Any],
    process: int,
    count: int,
    port: int,
    environment: Mapping[str, str],
    *arguments: Any,
) -> tuple[Any, float]:
    """Runs ``task`` as one of several processes, which share eight devices.

    Returns:
      What the task returned, and the CPU seconds that this process used.
    """
    begin = cpu_seconds()
    take_environment(environment)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process, initialization_timeout=300)
    try:
        result = task(process, *arguments)
    finally:
        jax.distributed.shutdown()
    return result, cpu_seconds() - begin
