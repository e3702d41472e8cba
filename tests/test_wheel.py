"""The wheel: what it holds, and that its command and its models work away from the repository.

``.ci/wheel`` installs it into an empty environment; here it borrows the requirements of the tests.
"""

import subprocess
import sys
import sysconfig
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import zerojax

pytestmark = pytest.mark.sweep
ROOT = Path(__file__).parents[1]
STEP = """
import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
import zerojax

jax.config.update("jax_num_cpu_devices", 8)
zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)

@zero
def train_step(state, batch):
    def loss_fn(params):
        return jnp.mean((batch @ params["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss

def create_state():
    return TrainState.create(apply_fn=None, params={"w": jnp.ones((8, 2))}, tx=optax.adam(0.1))

state, loss = train_step(zero.init(create_state), jnp.ones((8, 8)))
print(zerojax.__file__, float(loss), *state.params["w"].sharding.spec)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("zerojax-*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The ``bin`` of an environment with the wheel, and the tests' packages behind it."""
    folder = wheel.parent / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Python looks there last, and reads no .pth files there: an editable zerojax is not found.
    (packages / "behind.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", folder, "install", "-q", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    return folder / "bin"


def run(*command: object) -> str:
    """Standard output of a command, run where no zerojax lies."""
    folder = Path(str(command[0])).parent
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_the_command(environment: Path) -> None:
    assert "Usage: zerojax [OPTIONS]" in run(environment / "zerojax", "--help")
    module = [environment / "python", "-m", "zerojax"]
    assert "Usage: python -m zerojax [OPTIONS]" in run(*module, "--help")


def test_models_by_name(environment: Path) -> None:
    command = [environment / "zerojax", "estimate", "--model", "gpt2", "--nodes", "2"]
    assert "SW: model with 124M total params" in run(*command)


def test_a_step(environment: Path) -> None:
    source, loss, spec = run(environment / "python", "-c", STEP).split(maxsplit=2)
    assert Path(source).is_relative_to(environment.parent)
    assert Path(source) != Path(zerojax.__file__)
    assert (float(loss), spec.strip()) == (64.0, "data")
