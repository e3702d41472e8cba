"""What jax keeps to itself stands where this version of it has it."""

import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from packaging.requirements import Requirement

import zerojax
from zerojax.xla import compat

ROOT = Path(__file__).parents[2]
X = np.arange(4, dtype=np.float32)


def test_tested_versions_are_silent() -> None:
    """Warnings are errors in these tests."""
    for version in compat.TESTED:
        compat.warn_if_untested(version)


@pytest.mark.slow
def test_an_untested_jax_warns_once_and_starts_no_device() -> None:
    script = """if True:
        import warnings
        import jax
        jax.__version__ = "9.8.7"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import zerojax
            zerojax.zero, zerojax.Trainer, zerojax.grad
        from zerojax.xla import compat
        print(*(w.message for w in caught), compat.backends_are_initialized(), sep="\\n")
    """
    command = [sys.executable, "-c", script]
    told, started = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert "not with 9.8.7" in told
    assert all(version in told for version in compat.TESTED)
    assert started == "False"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "CONTRIBUTING.md"])
def test_pages_name_the_tested_versions(page: str) -> None:
    text = (ROOT / page).read_text()
    assert {*compat.TESTED} <= {*re.findall(r"\d+\.\d+\.\d+(?:\.\d+)?", text)}


def test_requirements_name_the_tested_versions() -> None:
    """The oldest is the lower bound; an upper bound, the newest, is for these tests alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = {
        extra: str(requirement.specifier)
        for extra, texts in {"": project["dependencies"], **extras}.items()
        for requirement in map(Requirement, texts)
        if requirement.name == "jax"
    }
    oldest, newest = f">={compat.TESTED[0]}", f"<={compat.TESTED[-1]}"
    assert bounds == {"": oldest, **dict.fromkeys(("cuda13", "tpu", "compile"), oldest),
                      "test": newest}  # fmt: skip


def double(x: Any) -> Any:
    return 2 * x


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, compat.JitOptions((), (), ())),
        ({"static_argnums": 1}, compat.JitOptions((1, "other"), (), ())),
        ({"donate_argnums": 0}, compat.JitOptions((), (0, "x"), ())),
        ({"compiler_options": {"a": 1}}, compat.JitOptions((), (), ("compiler_options",))),
        (
            {"out_shardings": jax.sharding.SingleDeviceSharding(jax.devices()[0])},
            compat.JitOptions((), (), ("out_shardings",)),
        ),
    ],
)
def test_options_of_jit(options: dict[str, Any], expected: compat.JitOptions) -> None:
    def function(x: Any, other: Any = None) -> Any:
        return x

    assert compat.jit_options(jax.jit(function, **options)) == expected


def test_a_program_is_compiled_for_devices_that_do_not_exist() -> None:
    """The compiler is named in jax's own record of what a lowered program is compiled with."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    mesh = zerojax.topology("h100", 1)
    abstract = jax.sharding.NamedSharding(mesh.abstract_mesh, jax.P())
    traced = jax.jit(double, in_shardings=abstract).trace(X)
    lowered = compat.lower_for(traced, mesh)
    assert isinstance(lowered, compat.LoweredFor)
    assert lowered._lowering.compile_args["backend"] is mesh.devices.flat[0].client
    assert "fusion" in lowered.compile().as_text()


def test_calls_find_room_for_frames_at_any_depth() -> None:
    """Counts the pages that calls map, each of which CPython unmaps when the call returns."""

    def nested(depth: int, function: Any) -> Any:
        return function() if depth == 0 else nested(depth - 1, function)

    def pages(call: Any) -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(300):
            call()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def most_pages(measured: Any) -> int:
        return max(nested(depth, measured) for depth in range(0, 200, 10))

    def calls() -> int:
        return pages(lambda: nested(20, int))

    assert most_pages(calls) >= 300
    assert most_pages(compat.with_large_stack(calls)) < 300
