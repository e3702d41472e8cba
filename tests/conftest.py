"""Eight virtual CPU devices for every test, whatever hardware there is."""

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that other users reach; pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 24 MB; None where none may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    yield tmp_path if mounted else None
    if mounted:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
