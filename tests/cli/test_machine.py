"""What is here: devices and packages."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from zerojax.cli.machine import Package, devices, packages

ZEROJAX = (
    "jax<0.12,>=0.10.2",
    "of-windows; sys_platform == 'win32'",
    'tensorboard>=2.16; extra == "monitor"',
)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name, version, *requires)``; nothing but what it installs is found."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name: str, version: str, *requires: str) -> None:
        fields = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
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


@pytest.mark.parametrize("version", ["0.11.2", "0.12.0", None])
def test_packages(install: Install, version: str | None) -> None:
    install("libtpu", "0.0.48")
    install("jaxlib", "1")
    if version:
        install("jax", version)
    own, jax, jaxlib, libtpu = packages()
    assert (own.name, own.version) == ("zerojax", "1")
    assert (jax.name, jax.version, jax.wanted) == ("jax", version, "<0.12,>=0.10.2")
    assert (jaxlib.version, libtpu.version) == ("1", "0.0.48")


def test_run_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert [*packages()] == [Package("zerojax", None)]


def test_this_installation() -> None:
    names = {package.name for package in packages()}
    assert {"zerojax", "jax", "flax", "optax", "rich", "typer"} <= names
    assert all(package.version for package in packages())
