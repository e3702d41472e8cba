"""What is here: devices, settings, packages, extras, and what was tried."""

from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

from zerojax.doctor import works
from zerojax.doctor.here import SETTINGS, devices, report, settings
from zerojax.doctor.installed import CORE, Found, _declared_in, declared, extras, packages
from zerojax.doctor.works import CHECKS, tried

ASKED = {
    CORE: [Requirement("jax>=0.10.2,<0.12")],
    "monitor": [Requirement("tensorboard>=2.16")],
    "cuda13": [Requirement("jax[cuda13]>=0.10.2")],
    "all": [Requirement("zerojax[monitor,cuda13]")],
}
JAX = Found(
    "0.11.2",
    (
        "numpy>=2",
        'jax-cuda13-plugin[with-cuda]==0.11.2; extra == "cuda13"',
        'requests; extra == "tpu"',
    ),
)
PLUGIN = Found(
    "0.11.1",
    (
        'nvidia-nvvm; extra == "with-cuda"',
        'of-windows; sys_platform == "win32" and extra == "with-cuda"',
    ),
)
PYPROJECT = """
[project]
name = "zerojax"
dependencies = ["jax>=0.10.2", "of-windows; sys_platform == 'win32'"]
[project.optional-dependencies]
compile = ["jax==0.1; python_version < '3'", "jax==0.11.2; python_version >= '3'"]
"""


def test_the_devices_of_the_tests() -> None:
    (found,) = devices()
    assert (found.platform, found.count, found.processes) == ("cpu", jax.device_count(), 1)
    assert "pinned_host" in found.memories
    assert found.limit is None
    assert found.in_use is None


def test_settings_say_what_holds() -> None:
    found = {s.name: s for s in settings({"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "HOME": "/"})}
    assert set(found) == {name for name, _, _ in SETTINGS}
    assert found["JAX_PLATFORMS"].value == "cpu"
    assert "not set" not in found["JAX_PLATFORMS"].says
    assert found["XLA_FLAGS"].value == ""
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"].value is None
    assert "not set: 0.75" in found["XLA_PYTHON_CLIENT_MEM_FRACTION"].says


def test_nothing_is_missing() -> None:
    there = {
        "jax": JAX,
        "jax-cuda13-plugin": PLUGIN._replace(version="0.11.2"),
        "nvidia-nvvm": Found("13.5"),
        "tensorboard": Found("2.16"),
    }
    assert all(extra.installed and not extra.remedy for extra in extras(ASKED, there.get))


def test_a_missing_extra_is_named_with_its_remedy() -> None:
    found = {extra.name: extra for extra in extras(ASKED, {"jax": JAX}.get)}
    assert set(found) == {"monitor", "cuda13", "all"}
    assert not found["monitor"].installed
    assert found["monitor"].missing == ("tensorboard>=2.16",)
    assert found["monitor"].remedy == "pip install 'zerojax[monitor]'"
    assert found["cuda13"].missing == ("jax-cuda13-plugin==0.11.2",)
    assert set(found["all"].missing) == {"tensorboard>=2.16", "jax-cuda13-plugin==0.11.2"}


def test_an_old_version_counts_as_missing() -> None:
    there = {"jax": JAX, "jax-cuda13-plugin": PLUGIN, "tensorboard": Found("2.9")}
    found = {extra.name: extra for extra in extras(ASKED, there.get)}
    assert found["monitor"].missing == ("tensorboard>=2.16 (found 2.9)",)
    assert found["cuda13"].missing == ("jax-cuda13-plugin==0.11.2 (found 0.11.1)", "nvidia-nvvm")


@pytest.mark.parametrize(("version", "fits"), [("0.11.2", True), ("0.12.0", False), (None, False)])
def test_packages(version: str | None, fits: bool) -> None:
    there = {"libtpu": Found("0.0.48"), "jaxlib": Found("1")}
    there |= {"jax": Found(version)} if version else {}
    own, found, jaxlib, libtpu = packages(ASKED, there.get)
    assert (own.name, own.version) == ("zerojax", None)
    assert (found.name, found.version, found.wanted) == ("jax", version, "<0.12,>=0.10.2")
    assert found.remedy == ("" if fits else "pip install 'jax<0.12,>=0.10.2'")
    assert (jaxlib.version, libtpu.version) == ("1", "0.0.48")


def test_run_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    assert _declared_in(path) == {}
    path.write_text(PYPROJECT)
    found = {extra: [*map(str, asked)] for extra, asked in _declared_in(path).items()}
    assert found == {CORE: ["jax>=0.10.2"], "compile": ["jax==0.11.2"]}
    path.write_text("[project]\nname = 'other'\ndependencies = ['x']")
    assert _declared_in(path) == {}


def test_the_extras_of_this_installation() -> None:
    assert {"cuda13", "tpu", "compile", "monitor", "export", "examples", "test"} <= set(declared())
    assert "jax" in [requirement.name for requirement in declared()[CORE]]
    assert "pytest" in [requirement.name for requirement in declared()["test"]]


def test_what_was_tried() -> None:
    def raises(error: Exception) -> str:
        raise error

    checks = (
        ("works", lambda: "on 8 devices"),
        ("text", lambda: raises(ValueError("no disk:\n  add one"))),
        ("bare", lambda: raises(AssertionError())),
        ("other", lambda: raises(KeyError("w"))),
    )
    found = tried(checks)
    assert [check.works for check in found] == [True, False, False, False]
    assert [check.says for check in found] == [
        "on 8 devices",
        "no disk: add one",
        "AssertionError",
        "KeyError: 'w'",
    ]
    assert all(check.seconds >= 0 for check in found)


def test_what_works_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    on_any = (works.stages, works.to_host, works.to_disk)
    found = report({}, [(name, check) for name, check in CHECKS if check in on_any])
    assert [(check.works, check.says) for check in found.works] == [
        (True, f"one step at each, over {jax.device_count()} devices"),
        (True, "one step with the state in pinned_host"),
        (True, f"one step with the state in files under {tmp_path}"),
    ]
    assert found.problem is None
    assert [*tmp_path.iterdir()] == []


def test_what_the_cpu_cannot() -> None:
    kernels, processes = tried([("kernels", works.kernels), ("processes", works.processes)])
    assert not kernels.works
    assert "H100" in kernels.says
    assert "simulator" in kernels.says
    assert not processes.works
    assert "jax.distributed.initialize()" in processes.says


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_a_compile_for_a_gpu() -> None:
    (check,) = tried([("compile", works.absent_gpus)])
    assert check.works, check.says
    assert "h100" in check.says
