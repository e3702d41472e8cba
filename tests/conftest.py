"""Eight virtual CPU devices for every test, whatever hardware there is."""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The kernels run on the GPU with ZEROJAX_TEST_ON=gpu; everything else is written for the CPU.
os.environ["JAX_PLATFORMS"] = "cuda,cpu" if os.environ.get("ZEROJAX_TEST_ON") == "gpu" else "cpu"
# With these XLA for CPU compiles soonest, in the processes that tests start too. From jax 0.11 on
# there is one code generator alone.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1"
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

import jax
from jax.experimental.compilation_cache import compilation_cache
from processes import fork_server, joined
from tiers import (
    OF_FORKED,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    resident,
)

from zerojax.launch.job import free_port

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
]

# Programs are many small objects, few of them garbage: collecting more rarely saves a tenth.
gc.set_threshold(50_000, 20, 100)

# No example fails because the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

ON_GPU = os.environ["JAX_PLATFORMS"] != "cpu"
jax.config.update("jax_num_cpu_devices", 8)


def gpu_compiler() -> bool:
    """Whether XLA's GPU compiler is installed."""
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(name) for name in plugins
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What ran where."""
    device = jax.devices()[0]
    where = "in the GPU simulator" if device.platform == "cpu" else f"on {device.device_kind}"
    compiled = "compiled for H100s" if gpu_compiler() else "not compiled: no GPU compiler here"
    terminalreporter.write_line(f"Pallas kernels: run {where}; {compiled}")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What zerojax and jax log; threads of other libraries may log in a later test than theirs."""

    def is_ours(record: logging.LogRecord) -> bool:
        return record.name.startswith(("zerojax", "jax"))

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)


@pytest.fixture
def require_gpu_compiler(full_compile: None, gpu_compiler_installed: None) -> None:
    """The GPU compiler with all of its passes, for tests of what it compiles."""


@pytest.fixture
def gpu_compiler_installed() -> None:
    """Skip where XLA's GPU compiler is not installed; fail where it was asked for, as CI does."""
    if gpu_compiler():
        return
    missing = "no XLA:GPU compiler here: pip install -e '.[compile]'"
    if os.environ.get("ZEROJAX_REQUIRE_GPU_COMPILER") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


MUCH, MOST = 0.4, 0.8
"""Gigabytes that a process may hold, above those that it held before the first test, when the tests
of a file are done, and after any test."""
HELD = pytest.StashKey[float]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes modules and tests out of every garbage collection, which took a second with them."""
    gc.collect()
    gc.freeze()
    session.config.stash[HELD] = resident()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees what only the tests of one file use: compiled programs, and their cached results."""
    ends = nextitem is None or nextitem.path != item.path
    module = getattr(item, "module", None) if ends else None
    for value in [*vars(module).values()] if module else ():
        own = getattr(value, "__module__", None) == module.__name__
        if own and hasattr(value, "cache_clear"):
            value.cache_clear()
    if resident() > item.config.stash[HELD] + (MUCH if ends else MOST):
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc keeps what is freed otherwise
            ctypes.CDLL(None).malloc_trim(0)


COMPILED = 4 * 10**9
"""Bytes of compiled programs that are kept; a number, so that jax locks the folder."""
SOON = 0.3
"""Seconds: what compiles sooner is not kept, as jax looks through all that it keeps."""


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of compiled programs, shared by processes and runs; jax locks and bounds it."""
    cache = getattr(pytestconfig, "cache", None)  # None under -p no:cacheprovider
    if cache is None:
        return tmp_path_factory.mktemp("compiled")
    folder = Path(cache.mkdir("compiled"))
    for program in folder.glob("*-cache"):
        # jax writes no further program beside one that a killed process left without its time.
        if not program.with_name(program.name.removesuffix("cache") + "atime").exists():
            program.unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled_in(compiled: Path) -> dict[str, str]:
    """Environment of a process that shares the folder of compiled programs."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(COMPILED),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(SOON),
    }


def configure(**options: Any) -> None:
    """Options of jax, ``jax_`` left out."""
    for name, value in options.items():
        jax.config.update(f"jax_{name}", value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def quick_compile(compiled: Path) -> Iterator[None]:
    """For tests of what a program computes: XLA without its costly passes, which takes a third of
    the time, and no program twice. A GPU runs what its users would."""
    if ON_GPU:
        yield
        return
    configure(
        disable_most_optimizations=True,
        compilation_cache_dir=str(compiled),
        compilation_cache_max_size=COMPILED,
        persistent_cache_min_compile_time_secs=SOON,
    )
    yield
    configure(
        disable_most_optimizations=False,
        compilation_cache_dir=None,
        compilation_cache_max_size=-1,
        persistent_cache_min_compile_time_secs=1.0,
    )


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the processes that a test starts."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@pytest.fixture
def full_compile(request: pytest.FixtureRequest, compiled: Path) -> Iterator[None]:
    """XLA's default optimizations, in a file of quick compiles too."""
    quick = "quick_compile" in request.fixturenames and not ON_GPU
    configure(disable_most_optimizations=False, compilation_cache_dir=None)
    yield
    configure(disable_most_optimizations=quick, compilation_cache_dir=str(compiled) * quick or None)


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """One entry for each program that jax compiles meanwhile."""
    seen: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        seen.extend(["compile"] if event.endswith("backend_compile_duration") else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def in_float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def in_processes() -> Iterator[Callable[..., list[Any]]]:
    """Runs a module's function in so many, with the number of the process and what else it is
    given, and returns what each returned."""
    with contextlib.ExitStack() as pools:

        def once(count: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
            port, environment = free_port(), dict(os.environ)
            pool = pools.enter_context(ProcessPoolExecutor(count, mp_context=fork_server()))
            begun = [
                pool.submit(joined, task, i, count, port, environment, *arguments)
                for i in range(count)
            ]
            results, seconds = zip(*[each.result() for each in begun], strict=True)
            OF_FORKED.extend(seconds)
            return [*results]

        def run(count: int, task: Callable[..., Any], *arguments: Any) -> list[Any]:
            try:
                return once(count, task, *arguments)
            except jax.errors.JaxRuntimeError as error:
                # Once, in CI, an all-gather of two processes waited in both until gloo's limit; 80
                # runs of the same test on a loaded machine did not. A second group tells a rare
                # stall of gloo from a program that always stalls.
                if "Gloo" not in str(error):
                    raise
                print(f"{task.__name__} again in {count} processes, after: {error}", flush=True)
                return once(count, task, *arguments)

        yield run


@pytest.fixture
def in_two_processes(in_processes: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The same in two."""
    return functools.partial(in_processes, 2)


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
