"""What goes wrong with a disk while a state on it is trained, and what is under way at once."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from offload.training import BATCH, create, train_step, zero_for
from offload.watched_store import WatchedStore

import zerojax
from zerojax.checkpoint import Checkpointer
from zerojax.offload.disk.folder import DiskError
from zerojax.offload.disk.store import DiskStateError

pytestmark = pytest.mark.usefixtures("quick_compile")

REMEDY = r"restore the last checkpoint \(Checkpointer.restore\)"


def values(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(state)]


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(values(a), values(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("kind", "said"), [("missing", "does not exist: make the"), ("file", "is a file: name a")]
)
def test_a_path_that_is_no_folder(tmp_path: Path, kind: str, said: str) -> None:
    path = tmp_path / "disk"
    if kind == "file":
        path.touch()
    with pytest.raises(DiskError, match=rf"nvme_path {path} {said}"):
        zero_for(path).init(create)
    plain = create()
    with pytest.raises(DiskError, match=rf"nvme_path {path} {said}"):
        zero_for(path)(train_step)(plain, BATCH)
    values(plain)  # still there


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


@pytest.mark.parametrize("harm", [damage, Path.unlink])
def test_a_file_damaged_between_steps(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    zero = zero_for(tmp_path)
    step, state = zero(train_step), zero.init(create)
    state, _ = step(state, BATCH)
    store = zero.states.placer.store
    store.wait()
    for file in store.path.glob("0*"):
        harm(file)
    named = rf"opt_state\[0\]\.mu\['w'\].*is damaged.*{REMEDY}"
    with pytest.raises(DiskStateError, match=named):
        np.asarray(state.opt_state[0].mu["w"])
    with pytest.raises(DiskStateError, match=rf"of params\['w'\].*is damaged.*{REMEDY}"):
        step(state, BATCH)
    with pytest.raises(DiskStateError, match=REMEDY):
        step(state, BATCH)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("harm", [damage, Path.unlink])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_compute_parameter_damaged_between_steps(
    tmp_path: Path, harm: Callable[[Path], None], devices: int
) -> None:
    """Read within a program, whose devices wait for one another: the step ends, with an error."""
    disks = [tmp_path / "state", tmp_path / "params"]
    for disk in disks:
        disk.mkdir()
    state_on, params_on = (
        {"device": "nvme", "nvme_path": str(disk), "buffer_count": 2} for disk in disks
    )
    zero = zerojax.zero(
        stage=3,
        bf16=True,
        stage3_param_persistence_threshold=0,
        mesh=zerojax.mesh(devices),
        offload_optimizer=state_on,
        offload_param={**params_on, "max_in_cpu": 0},
    )
    step, state = zero(train_step), zero.init(create)
    state, _ = step(state, BATCH)
    store = zero.states.placer.copies_store
    store.wait()
    for file in store.path.glob("0*"):
        harm(file)
    before = values(state)
    for _ in range(2):
        with pytest.raises(DiskStateError, match=rf"params\['\w'\] in .*bfloat16.*{REMEDY}"):
            step(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, values(state), before)


class Interruption(BaseException):
    """As Ctrl-C makes one, at a known moment."""


def test_a_step_interrupted_half_way(tmp_path: Path) -> None:
    left: list[int] = []

    def event(kind: str, key: str) -> None:
        if left and kind == "write issued":
            left[0] -= 1
            if not left[0]:
                raise Interruption

    nvme, folder = tmp_path / "nvme", tmp_path / "run"
    nvme.mkdir()
    zero = zero_for(nvme)
    zero.states.placer.store = WatchedStore(nvme, event)
    step, state = zero(train_step), zero.init(create)
    state, _ = step(state, BATCH)
    with Checkpointer(folder, zero) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        left.append(4)
        with pytest.raises(Interruption):
            step(state, BATCH)
        left.clear()
        for x in jax.tree.leaves((state.params, state.opt_state[0].mu)):
            with pytest.raises(DiskStateError, match=f"half updated.*interrupted.*{REMEDY}"):
                np.asarray(x)
        with pytest.raises(DiskStateError, match=f"half updated.*interrupted.*{REMEDY}"):
            step(state, BATCH)
        got = checkpointer.restore(zero.abstract_state(create))
    want = zero.init(create)
    for _ in range(2):
        want, _ = step(want, BATCH)
    assert_same(step(got, BATCH)[0], want)


def test_the_next_sub_group_is_read_before_the_last_is_written(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    zero = zero_for(tmp_path)
    zero.states.placer.store = WatchedStore(tmp_path, lambda kind, key: told.append((kind, key)))
    step, state = zero(train_step), zero.init(create)
    state, _ = step(state, BATCH)
    zero.states.placer.store.wait()
    told.clear()
    step(state, BATCH)
    zero.states.placer.store.wait()
    issued = [(kind.split()[0], key) for kind, key in told if kind.endswith("issued")]
    runs = [
        (kind, [key for _, key in run])
        for kind, run in itertools.groupby(issued, key=lambda event: event[0])
    ]
    n = len(runs) // 2 + 1  # of sub-groups
    assert n > 3
    assert [kind for kind, _ in runs] == ["read", "write"] * (n - 1)
    reads, writes = ([set(keys) for _, keys in runs[i::2]] for i in (0, 1))
    # Reads of groups 0 and 1, writes of 0, reads of 2, writes of 1, ... and of the last two.
    groups = [writes[0], reads[0] - writes[0], *reads[1:]]
    assert all(groups)
    assert writes == [*groups[: n - 2], groups[n - 2] | groups[n - 1]]
    keys = [key for kind, key in issued if kind == "read"]
    assert len(keys) == len(set(keys)), "something was read twice"
    assert sorted(keys) == sorted(key for kind, key in issued if kind == "write")
