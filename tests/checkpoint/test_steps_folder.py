"""Folders of steps, and a bucket, where what holds on a disk holds too."""

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import optax
import pytest
from checkpoint import apart, bucket
from checkpoint.states import KEY, assert_same, create_linen, filled, zero_of
from etils import epath
from flax.training.train_state import TrainState
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, steps_folder
from zerojax.checkpoint.inspection import inspect

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket.served(monkeypatch) as url:
        yield url


@pytest.mark.slow
@bucket.require
def test_a_bucket(url: str) -> None:
    zero = zero_of(3)
    state = filled(zero.init(create_linen, KEY))
    other = zero_of(1, 4)
    abstract = other.abstract_state(create_linen, KEY)
    run = epath.Path(url) / "run"
    with Checkpointer(f"{url}/run", zero, keep=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state, extra={"step": step})
        checkpointer.wait()
        assert checkpointer.all_steps() == [2, 3]
        assert sorted(x.name for x in run.iterdir()) == ["2", "3"]
        assert checkpointer.extra() == {"step": 3}
        checkpointer.delete(3)
        checkpointer.save(4, state)
    with Checkpointer(f"{url}/run", other, read_only=True) as checkpointer:
        assert_same(checkpointer.restore(abstract), state)
        file = next(iter((run / "4" / "state" / "d").iterdir()))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(bytes(data))
        with pytest.raises(DamagedCheckpointError, match="Step 2 looks complete") as told:
            checkpointer.restore(abstract)
        assert file.name in str(told.value)
        assert_same(checkpointer.restore(abstract, 2), state)
    assert [(x.step, x.status) for x in inspect(run).steps] == [(2, "complete"), (4, "damaged")]


@pytest.mark.slow
@bucket.require
def test_what_a_killed_run_left_in_a_bucket_is_no_step(
    url: str, small: tuple[zerojax.Zero, TrainState]
) -> None:
    zero, state = small
    with Checkpointer(url, zero) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        left = epath.Path(url) / "2"
        for file in ("zerojax.json", "state/_METADATA"):
            (left / file).write_text((epath.Path(url) / "1" / file).read_text())
        assert checkpointer.all_steps() == [1]
    with Checkpointer(url, zero) as checkpointer:
        assert checkpointer.latest_step() == 1
        checkpointer.save(3, state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 3]
        assert not left.exists()


@bucket.require
def test_two_processes_share_a_bucket(url: str, in_two_processes: Callable[..., Any]) -> None:
    assert in_two_processes(apart.save_in_bucket, url) == [[2], [2]]


@bucket.require
def test_a_bucket_that_does_not_answer() -> None:
    end = threading.Event()

    class Silent(PurePosixPath):
        """Requests of gcsfs itself would outlast the test: it retries them from a thread."""

        def __fspath__(self) -> str:
            return "gs://b/run"

        __str__ = __fspath__

        def exists(self) -> bool:
            return end.wait()

    try:
        with pytest.raises(CheckpointError, match=r"gs://b/run does not answer within 0.5 s"):
            steps_folder.require_answer(Silent(), 0.5)
    finally:
        end.set()


def test_a_bucket_without_gcsfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    says = r"gs://bucket/run needs gcsfs: .*pip install -e .\.\[bucket\]"
    with pytest.raises(CheckpointError, match=says):
        Checkpointer("gs://bucket/run", zerojax.zero(stage=0))


def test_a_step_on_a_disk_appears_with_its_name(tmp_path: Path) -> None:
    root = epath.Path(tmp_path)
    folder = steps_folder.under_way(root, 7)
    folder.mkdir()
    (root / "notes").mkdir()
    assert steps_folder.folders(root) == {}
    steps_folder.complete(folder, 7)
    assert steps_folder.folders(root) == {7: root / "7"}
    steps_folder.remove(root, 7)
    assert steps_folder.folders(root) == {}
    assert (root / ".deleted" / "7").is_dir()
    steps_folder.sweep(root)
    assert [x.name for x in root.iterdir()] == ["notes"]


def test_a_step_s_name_is_a_number_as_python_prints_it(tmp_path: Path) -> None:
    for name in ("2", "0", "10", "٣", "0002", "1_0", "+3", " 4", "²", "00000007"):
        (tmp_path / name).mkdir()
    (tmp_path / "0002" / "zerojax.json").touch()  # a copy of a step of zerojax's
    # Plain orbax pads names (step_format_fixed_length).
    root = epath.Path(tmp_path)
    assert steps_folder.folders(root) == {
        0: root / "0", 2: root / "2", 7: root / "00000007", 10: root / "10"
    }  # fmt: skip


PIECES = st.sampled_from([*"[]*?!-\\{}~#%&' \n\"é.:=,\0\udcff", "**", "lr=0.1", "[!a]", "a"])
NAMES = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(lambda x: x.strip("."))


@pytest.fixture(scope="module")
def small() -> tuple[zerojax.Zero, TrainState]:
    def create(key: jax.Array) -> TrainState:
        params = {"w": jax.random.normal(key, (3,))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.identity())

    zero = zerojax.zero(stage=0, mesh=zerojax.mesh(1))
    return zero, zero.init(create, KEY)


@settings(max_examples=8, derandomize=True)
@example(name="run[lr=0.1]")
@example(name="a\\b")
@example(name="a*?**")
@given(name=NAMES)
def test_a_folder_of_any_name_works_or_is_refused(
    small: tuple[zerojax.Zero, TrainState], name: str
) -> None:
    zero, state = small
    with tempfile.TemporaryDirectory() as parent:
        (Path(parent) / "aaaaaaa").mkdir()  # what a pattern may match
        folder = f"{parent}/{name}"
        if {"\\", "\0", "\udcff"} & {*name}:
            with pytest.raises(CheckpointError, match="choose another name"):
                Checkpointer(folder, zero)
            return
        left = Path(folder, "1.orbax-checkpoint-tmp")
        left.mkdir(parents=True)
        with Checkpointer(folder, zero) as checkpointer:
            checkpointer.save(3, state)
            checkpointer.wait()
            assert not left.exists()
            assert_same(checkpointer.restore(state), state)
        assert [(x.step, x.status) for x in inspect(folder).steps] == [(3, "complete")]
