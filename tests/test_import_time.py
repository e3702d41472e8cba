"""``import zerojax`` loads no more than what is used needs, and shows the API and nothing else."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import zerojax

ROOT = Path(__file__).parents[1]
SCRIPT = """
import json, sys
import flax.linen, flax.nnx, jax, optax
from flax.training import train_state
before = set(sys.modules)
import zerojax
zerojax.zero
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def loaded() -> list[str]:
    """The modules that ``zerojax.zero`` adds to those of jax, flax and optax."""
    command = [sys.executable, "-c", SCRIPT]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names: list[str] = json.loads(told)
    return names


@pytest.mark.parametrize(
    "heavy",
    [
        "pallas_kernels",
        "jax._src.pallas",
        "jaxlib.mlir.dialects",
        "orbax",
        "tensorstore",
        "rich",
        "typer",
        "transformers",
        "zerojax.checkpoint",
        "zerojax.cli",
        "zerojax.models.gpt",
        "zerojax.models.kernels",
    ],
)
def test_import_loads_no(heavy: str, loaded: list[str]) -> None:
    assert "zerojax.api" in loaded
    assert not [name for name in loaded if name == heavy or name.startswith(f"{heavy}.")]


def test_import_alone_loads_no_jax() -> None:
    """So that `zerojax launch` starts at once, and holds no device."""
    script = "import sys, zerojax, zerojax.__main__; print('jax' in sys.modules, len(sys.modules))"
    command = [sys.executable, "-c", script]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert told[0] == "False"
    assert int(told[1]) < 400


@pytest.mark.parametrize(("version", "code"), [("0.9.2", 1), ("0.10.1.dev1", 1), ("0.11.0rc1", 0)])
def test_an_older_jax_is_refused_at_the_import(version: str, code: int, tmp_path: Path) -> None:
    info = tmp_path / f"jax-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", "import zerojax"], cwd=ROOT, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code
    told = f"zerojax needs jax>=0.10.2, and jax {version} is installed: run pip install -U"
    assert (told in done.stderr) == bool(code)


def test_dir_is_the_api() -> None:
    rooms = {"api", "config", "optim", "step", "xla"}
    assert not rooms.intersection(dir(zerojax))
    assert {*dir(zerojax)} == {*zerojax.__all__, "__version__"}
    shown: list[Any] = [getattr(zerojax, name) for name in zerojax.__all__]
    assert [x for x in shown if not callable(x)] == [zerojax.models, zerojax.weights]  # modules


def test_version_is_that_of_the_wheel() -> None:
    assert zerojax.__version__ == metadata.version("zerojax")
