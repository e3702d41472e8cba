"""What each of two processes does where one of them cannot."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from checkpoint.test_disk_full import create
from etils import epath

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, writer
from zerojax.checkpoint import restore as restoring
from zerojax.checkpoint.processes import call_on_all, call_on_first, gather_strings, share_a_folder
from zerojax.distributed.launched import LaunchError


class Failure(NamedTuple):
    """An error."""

    kind: str
    said: str


def failure(act: Any) -> Failure:
    with pytest.raises(CheckpointError) as told:
        act()
    return Failure(type(told.value).__name__, str(told.value))


@contextlib.contextmanager
def small_files(most: int) -> Iterator[None]:
    """As on a disk that is full: no file of this process grows beyond ``most`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def act(process: int, words: Path, saved: Path, extras: Path) -> dict[str, dict[str, Any]]:
    """Calls the functions below, each with another folder."""
    return {
        "words": agree(process, words),
        "saved": save_and_fail(process, saved),
        "extras": keep_own_extras(process, extras),
    }


def agree(process: int, folder: Path) -> dict[str, Any]:
    """Words, errors and folders that are not shared."""

    def fails(*processes: int, kind: type[Exception] = ValueError) -> Failure:
        def act() -> None:
            if process in processes:
                raise kind("no")

        return failure(lambda: call_on_all("a test", act))

    own = epath.Path(folder / str(process))

    def claim() -> None:
        own.mkdir()

    def refuse() -> None:
        raise CheckpointError("taken")

    return {
        "own": call_on_all("a test", lambda: process),
        "told": gather_strings("a test", lambda: f"n{process}"),
        "first": call_on_first("a test", lambda: f"n{process}"),
        "one fails": fails(1),
        "both fail": fails(0, 1, kind=CheckpointError),
        "damaged": fails(0, kind=DamagedCheckpointError),
        "not shared": failure(lambda: share_a_folder(own, claim, 1.0)),
        "taken": failure(lambda: share_a_folder(own, refuse)),
        "left": [x.name for x in own.glob("*")] if own.exists() else [],
    }


def save_and_fail(process: int, folder: Path) -> dict[str, Any]:
    """Saves where one process cannot; the next save and a restore."""
    zero = zerojax.zero(stage=3)
    states = [zero.init(create, jax.random.key(i)) for i in range(3)]
    abstract = zero.abstract_state(create, jax.random.key(0))
    found: dict[str, Any] = {"held": failure(lambda: Checkpointer(folder / "held", zero))}

    with Checkpointer(folder / "run", zero) as checkpointer:
        checkpointer.save(0, states[0])
        checkpointer.wait()
        for rank in (0, 1):
            with small_files(2**16) if process == rank else contextlib.nullcontext():
                checkpointer.save(1, states[1])
                found[f"disk of {rank}"] = failure(checkpointer.wait)
            found[f"after {rank}"] = checkpointer.all_steps(), _under_way(folder / "run")
            call_on_all("both have looked", lambda: None)  # before process 0 makes the next folder

        call_on_all("the obstacle", lambda: None)
        if process == 0:  # process 0 cannot make the folder of the step
            (folder / "run" / "1.orbax-checkpoint-tmp").touch()
        found["folder of 0"] = failure(lambda: checkpointer.save(1, states[1]))
        call_on_all("the obstacle", (folder / "run" / "1.orbax-checkpoint-tmp").unlink
               if process == 0 else lambda: None)  # fmt: skip
        found["no state"] = failure(lambda: checkpointer.save(1, states[1] if process else {}))

        checkpointer.save(1, states[1], extra={"of": 1})
        checkpointer.wait()
        found["steps"] = checkpointer.all_steps()
        with pytest.MonkeyPatch.context() as patch:
            if process == 1:
                patch.setattr(restoring, "match", damaged)
            found["restore"] = failure(lambda: checkpointer.restore(abstract))
        assert_shards(checkpointer.restore(abstract), states[1])
    with (
        Checkpointer(folder / "run", zerojax.zero(stage=2 + process)) as checkpointer,
        pytest.raises(LaunchError) as refused,
    ):
        checkpointer.restore(abstract)
    found["configs"] = str(refused.value)

    found["on disk"] = _on_disk(process, folder)
    return found


def _on_disk(process: int, folder: Path) -> Failure:
    """Optimizer state on a disk of each process: fails, is saved, restored and saved again."""
    own = folder / f"nvme{process}"
    own.mkdir()
    offload = {"device": "nvme", "nvme_path": str(own)}
    zero = zerojax.zero(stage=3, offload_optimizer=offload)
    state = zero.init(create, jax.random.key(0))
    with Checkpointer(folder / "disk", zero) as checkpointer:
        with small_files(2**16) if process == 1 else contextlib.nullcontext():
            failed = failure(lambda: checkpointer.save(0, state))
        checkpointer.save(1, state)
        got = checkpointer.restore(zero.abstract_state(create, jax.random.key(0)))
        checkpointer.save(2, got)
    return failed


def save_in_bucket(process: int, url: str) -> list[int]:
    """Saves twice and restores."""
    zero = zerojax.zero(stage=3)
    state = zero.init(create, jax.random.key(0))
    with Checkpointer(url, zero, keep=1) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.save(2, state)
        assert_shards(checkpointer.restore(state), state)
        return checkpointer.all_steps()


def assert_shards(got: Any, state: Any) -> None:
    """This process's shards are the same."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(state), strict=True):
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)


def _under_way(folder: Path) -> list[str]:
    return [x.name for x in folder.glob("*tmp*")]


def damaged(*_: Any, **__: Any) -> None:
    raise DamagedCheckpointError("a byte is another one")


def die_in_a_save(process: int, port: int, folder: Path) -> None:
    """Process 1 is killed when its arrays of step 1 are written; process 0 waits for it."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, process, heartbeat_timeout_seconds=20)
    zero = zerojax.zero(stage=3)
    state = zero.init(create, jax.random.key(0))
    with Checkpointer(folder, zero) as checkpointer:
        checkpointer.save(0, state)
        checkpointer.wait()
        if process == 1:
            writer.wait_for = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        checkpointer.save(1, state)
        checkpointer.wait()


def keep_own_extras(process: int, folder: Path) -> dict[str, Any]:
    """A loader's own position in each process, the same one in both, and a step set in one."""
    zero = zerojax.zero(stage=3)
    state = zero.init(create, jax.random.key(0))
    ahead = state.replace(step=state.step + 1) if process else state
    found: dict[str, Any] = {}
    with Checkpointer(folder, zero) as checkpointer:
        extra = {"position": 10 + process, "epoch": 1, "key": jax.random.key(process)}
        checkpointer.save(1, state, extra=extra)
        got = checkpointer.extra()
        found["own"] = got["position"], jax.random.key_data(got["key"]).tolist(), got["epoch"]
        found["other"] = checkpointer.extra(process=1 - process)["position"]
        found["step"] = failure(lambda: checkpointer.save(2, ahead))
        checkpointer.save(2, state, extra={"position": 20})
        checkpointer.wait()
        found["same"] = checkpointer.extra()
        found["steps"] = checkpointer.all_steps()
    return found
