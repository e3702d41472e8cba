"""The wheel: what it holds. ``.ci/wheel`` installs it and runs README's lines."""

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("zerojax-*.whl")
    return path


def test_what_the_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_string(file.read(f"{info}/METADATA").decode())
        entry_points = file.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"zerojax", "pallas_kernels", info}
    # All that git has of the two packages, and nothing else.
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", "zerojax"]
    listed = subprocess.run(
        [*tracked, "pallas_kernels"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {name for name in names if info not in name} == {
        f for f in listed if (ROOT / f).exists()
    }
    assert {"zerojax/py.typed", "pallas_kernels/py.typed", "zerojax/models/names.py"} <= names
    assert "zerojax/devices/device_kinds.json" in names
    assert f"{info}/licenses/LICENSE" in names
    assert (metadata["Name"], metadata["License-Expression"]) == ("zerojax", "Apache-2.0")
    assert "zerojax = zerojax.__main__:main" in entry_points
    assert "gpt2 = zerojax.models.names:gpt2" in entry_points
