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
    """Skip where XLA's GPU compiler is not installed; fail where it was asked for, as CI does."""
    if importlib.util.find_spec("jax_plugins") and (
        importlib.util.find_spec("jax_plugins.xla_cuda13")
        or importlib.util.find_spec("jax_plugins.xla_cuda12")
    ):
        return
    missing = "no XLA:GPU compiler here: pip install 'zerojax[compile]'"
    if os.environ.get("ZEROJAX_REQUIRE_GPU_COMPILER") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """XLA without its costly passes, for tests of what a program computes: a third of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
