"""Eight virtual CPU devices for every test, whatever hardware there is."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def require_gpu_compiler() -> None:
    """Skip where XLA's GPU compiler is not installed; CI installs it."""
    if importlib.util.find_spec("jax_plugins") is None or not any(
        importlib.util.find_spec(f"jax_plugins.{name}") for name in ("xla_cuda13", "xla_cuda12")
    ):
        pytest.skip("no XLA:GPU compiler here: pip install 'zerojax[compile]'")


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """XLA without its costly passes, for tests of what a program computes: a third of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
