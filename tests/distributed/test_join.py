"""Processes that join, from environments as launchers make them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from groups import LIMIT

import zerojax
from zerojax.distributed.launched import LaunchError
from zerojax.launch.job import free_port

pytestmark = pytest.mark.slow

# All processes fail together; process 0 waits until the others have said why.
JOIN = f"""
import os, sys, time
import zerojax
from zerojax.distributed import coordinator
part = coordinator.part
coordinator.part = lambda me, others, _: part(me, others, {LIMIT})
zerojax.init_distributed({{"zero_optimization": {{"stage": 2}}}})
"""

TRAIN = f"""{JOIN}
zerojax.init_distributed()
import jax, jax.numpy as jnp, optax
from flax.training.train_state import TrainState
from zerojax.distributed.exchange import exchange

me = jax.process_index()

def create_state():
    return TrainState.create(apply_fn=None, params={{"w": jnp.ones((8, 4))}}, tx=optax.adam(1.0))

state = zerojax.zero(stage=2).init(create_state)
print("devices of w:", len(state.params["w"].sharding.device_set), flush=True)
try:
    zerojax.zero(stage=2 + me).init(create_state)
except RuntimeError as error:
    print(error, flush=True)
exchange("what all have printed", "", {LIMIT})
if me == 1:
    raise ValueError("of my own")
time.sleep(3600)
"""


def launch(script: str, *differs: dict[str, str]) -> list[subprocess.Popen[str]]:
    """A process for each of ``differs``, what its environment has beside torchrun's variables."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    shared |= {"WORLD_SIZE": str(len(differs))}
    return [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "2", "RANK": str(rank)} | shared | differ,
        )
        for rank, differ in enumerate(differs)
    ]


def said_by(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=LIMIT)
    return out + err


def test_joined_compared_and_ended(tmp_path: Path) -> None:
    proxy = {"http_proxy": "http://proxy.invalid:3128", "no_proxy": ""}  # takes no messages of JAX
    folder = {"ZEROJAX_RUN_DIR": str(tmp_path), **proxy}
    begun = time.time()
    first, second = launch(TRAIN, folder, folder)
    said = said_by(second)
    ended = time.time()
    assert second.returncode == 1
    assert first.poll() is None  # the sleeping one ends by its launcher's hand
    first.kill()
    for text in (said, said_by(first)):
        assert "devices of w: 4" in text
        assert "the processes do not fit together:\n  stage of the config differs:" in text
    assert said.rstrip().endswith("ValueError: of my own")
    files = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert sorted(files) == ["error.1", "joined.0", "joined.1"]
    at, trace = files["error.1"].split("\n", 1)
    assert trace.endswith("ValueError: of my own\n")
    assert begun < float(at) < ended
    assert not files["joined.1"]


def test_what_does_not_fit_is_the_same_error_in_all() -> None:
    for each in launch(JOIN, {}, {"JAX_NUM_CPU_DEVICES": "3"}):
        assert "the number of devices differs: 2 in process 0; 3 in process 1." in said_by(each)
        assert each.returncode == 1
    for each in launch(JOIN.replace("2}", '2 + int(os.environ["RANK"])}'), {}, {}):
        said = said_by(each)
        assert "stage of the config differs: 2 in process 0; 3 in process 1" in said


def test_a_process_that_has_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="torchrun started 2 processes, and number 1 has not"):
        zerojax.zero(stage=1)
    jax.devices()
    with pytest.raises(LaunchError, match="JAX is in use already in process 1 of 2"):
        zerojax.init_distributed()
    monkeypatch.delenv("MASTER_PORT")
    zerojax.zero(stage=1)  # half an environment is perhaps of something else
    with pytest.raises(LaunchError, match="MASTER_PORT is not"):
        zerojax.init_distributed()


@pytest.mark.gpu_compile
def test_absent_devices_need_no_other_process(
    monkeypatch: pytest.MonkeyPatch, require_gpu_compiler: None
) -> None:
    monkeypatch.setenv("ZEROJAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("ZEROJAX_PROCESS_ID", "1")
    monkeypatch.setenv("ZEROJAX_COORDINATOR", "n1:4000")
    zerojax.zero(stage=1, mesh=zerojax.topology("h100", devices=8))


def test_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROJAX_RUN_DIR", str(tmp_path))
    before = sys.excepthook
    zerojax.init_distributed()
    assert sys.excepthook is before
    assert [each.name for each in tmp_path.iterdir()] == ["joined.0"]
