"""Processes that do not make the same calls."""

import re
from pathlib import Path

import pytest
from launch.launched import launched

from zerojax.distributed.coordinator import Coordinator
from zerojax.distributed.lockstep import Lockstep

pytestmark = pytest.mark.slow

SCRIPT = """
import zerojax
zerojax.init_distributed()
import jax, numpy as np, optax, time
from flax.training.train_state import TrainState
from zerojax.checkpoint import Checkpointer

def create_state():
    params = {"w": jax.numpy.ones((8, 4))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)

@zero
def train_step(state, batch, rate=1.0, key=None):
    return state.apply_gradients(grads=jax.grad(loss)(state.params, rate * batch))

@zero.evaluate
def evaluate(state, batch):
    return loss(state.params, batch)

state, batch = zero.init(create_state), np.ones((4, 8), np.float32)
state = train_step(state, batch)
"""

ALONE = """
checkpointer = Checkpointer("steps", zero)
if me == 0:
    checkpointer.save(1, state)
state = train_step(state, batch)
print(float(evaluate(state, batch)))
"""


def test_one_process_alone(tmp_path: Path) -> None:
    """It is an error soon, where all would wait for ever."""
    said = r"call 5 of zerojax is (a save of step 1|train_step\(...\)) in process [01], at "
    told = launched(tmp_path, SCRIPT + ALONE, "--nproc-per-node=2")
    assert told.status == 1, told.err
    shown = told.err.partition("zerojax launch: process ")[2]
    assert "failed first: status 1" in shown
    assert re.search(said, shown), shown
    assert "Run the same steps" in shown


CHANGED = """
rate, key = np.ones(1), jax.random.key(0)
for at in range(9):
    if me == 1 and at == 5:
        {change}
    state = train_step(state, batch, rate, key)
    time.sleep(0.5)
"""
PARAMS = "state = state.replace(params=jax.tree.map(lambda x: {}, state.params))"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            PARAMS.format("x.astype('bfloat16')"),
            r"_step\(a state from elsewhere, ...\) in process 1",
        ),
        (PARAMS.format("x / 2"), r"train_step\(a state from elsewhere, ...\) in process 1"),
        ("rate = np.full(1, 0.5)", r"train_step: argument \[0\] behind the batch is \[0.5\] in"),
        ("key = jax.random.key(1)", r"train_step: argument \[1\] behind .* \[0, 1\] in process 1"),
    ],
)
def test_one_process_with_other_values(tmp_path: Path, change: str, says: str) -> None:
    """Its devices would hold other numbers, or wait in a program that no other process runs."""
    told = launched(tmp_path, SCRIPT + CHANGED.format(change=change), "--nproc-per-node=2")
    assert told.status == 1, told.err
    assert re.search(says, told.err), told.err


def test_where_two_stand_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    """As where process 0 alone fetches an array of all, which is no call of zerojax."""
    first, other = Lockstep(Coordinator()), Lockstep(Coordinator(), silent=0.0)
    for calls in (first, other):
        calls.note("train_step(...)")
    other.compare(first.snapshot())
    other.note("train_step(...)")
    described = first.snapshot()
    for _ in range(4):
        other.compare(described)
    said = capsys.readouterr().err
    assert said.count("process 0 has been at ") == 1
    assert "test_lockstep.py:" in said
    assert "in or after call 1 of zerojax, and process 0 is at" in said
