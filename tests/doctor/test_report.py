"""What is here: devices, packages, extras."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from zerojax.doctor.packages import Package, extras, packages
from zerojax.doctor.report import devices

ZEROJAX = (
    "jax<0.12,>=0.10.2",
    "of-windows; sys_platform == 'win32'",
    'tensorboard>=2.16; extra == "monitor"',
    'jax[cuda13]>=0.10.2; extra == "cuda13"',
    'zerojax[cuda13,monitor]; extra == "all"',
)
JAX = (
    "numpy>=2",
    'jax-cuda13-plugin[with-cuda]==0.11.2; extra == "cuda13"',
    'requests; extra == "tpu"',
)
PLUGIN = (
    'nvidia-nvvm; extra == "with-cuda"',
    'of-windows; sys_platform == "win32" and extra == "with-cuda"',
)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name, version, *requires)``; nothing but what it installs is found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name: str, version: str, *requires: str) -> None:
        extras = {m for each in requires for m in re.findall('extra == "(.*?)"', each)}
        fields = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        fields += [f"Provides-Extra: {extra}" for extra in sorted(extras)]
        fields += [f"Requires-Dist: {each}" for each in requires]
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("\n".join(fields) + "\n")

    install("zerojax", "1", *ZEROJAX)
    return install


def test_the_devices_of_the_tests() -> None:
    (found,) = devices()
    assert (found.platform, found.count, found.processes) == ("cpu", jax.device_count(), 1)
    assert "pinned_host" in found.memories
    assert found.limit is None


def test_nothing_is_missing(install: Install) -> None:
    install("jax", "0.11.2", *JAX)
    install("jax-cuda13-plugin", "0.11.2", *PLUGIN)
    install("nvidia-nvvm", "13.5")
    install("tensorboard", "2.16")
    assert all(extra.installed and not extra.remedy for extra in extras())


def test_a_missing_extra_is_named_with_its_remedy(install: Install) -> None:
    install("jax", "0.11.2", *JAX)
    found = {extra.name: extra for extra in extras()}
    assert set(found) == {"monitor", "cuda13", "all"}
    assert not found["monitor"].installed
    assert found["monitor"].missing == ("tensorboard>=2.16",)
    assert found["monitor"].remedy == "pip install -e '.[monitor]'"
    assert found["cuda13"].missing == ("jax-cuda13-plugin==0.11.2",)
    assert set(found["all"].missing) == {"tensorboard>=2.16", "jax-cuda13-plugin==0.11.2"}


def test_an_old_version_counts_as_missing(install: Install) -> None:
    install("jax", "0.11.2", *JAX)
    install("jax-cuda13-plugin", "0.11.1", *PLUGIN)
    install("tensorboard", "2.9")
    found = {extra.name: extra for extra in extras()}
    assert found["monitor"].missing == ("tensorboard>=2.16 (found 2.9)",)
    assert found["cuda13"].missing == ("jax-cuda13-plugin==0.11.2 (found 0.11.1)", "nvidia-nvvm")


@pytest.mark.parametrize(("version", "fits"), [("0.11.2", True), ("0.12.0", False), (None, False)])
def test_packages(install: Install, version: str | None, fits: bool) -> None:
    install("libtpu", "0.0.48")
    install("jaxlib", "1")
    if version:
        install("jax", version)
    own, jax, jaxlib, libtpu = packages()
    assert (own.name, own.version) == ("zerojax", "1")
    assert (jax.name, jax.version, jax.wanted) == ("jax", version, "<0.12,>=0.10.2")
    assert jax.remedy == ("" if fits else "pip install 'jax<0.12,>=0.10.2'")
    assert (jaxlib.version, libtpu.version) == ("1", "0.0.48")


def test_run_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert packages() == (Package("zerojax", None),)
    assert extras() == ()


def test_an_extra_for_another_python_is_not_installed(install: Install, tmp_path: Path) -> None:
    (tmp_path / "zerojax-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: zerojax\nVersion: 1\nProvides-Extra: attention\n"
        'Requires-Dist: tokamax<0.1; (python_version >= "99") and extra == "attention"\n'
    )
    (attention,) = extras()
    assert not attention.installed
    assert attention.missing == ("another Python",)
    assert attention.remedy == ""


def test_this_installation() -> None:
    names = {extra.name for extra in extras()}
    assert {"cuda13", "tpu", "compile", "monitor", "examples", "test"} <= names
    assert all(package.version and not package.remedy for package in packages())
