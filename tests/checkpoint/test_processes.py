"""Two processes of which one cannot: both are told so, and can go on."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from checkpoint import apart
from checkpoint.states import assert_same
from checkpoint.test_disk_full import create
from etils import epath
from groups import LIMIT
from orbax.checkpoint import v1
from processes import fork_server

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError, DamagedCheckpointError, inspect
from zerojax.checkpoint import record as records
from zerojax.launch.job import free_port

Run = Callable[..., list[dict[str, Any]]]


def test_words_errors_saves_and_extras(
    tmp_path_factory: pytest.TempPathFactory, in_two_processes: Run
) -> None:
    """In the same two processes, as most of the time is that of their start."""
    words, saved, extras = map(tmp_path_factory.mktemp, ("words", "saved", "extras"))
    with Checkpointer(saved / "held", zerojax.zero(stage=0)):
        every = in_two_processes(apart.act, words, saved, extras)
    check_words_errors_and_folders([each["words"] for each in every])
    check_one_that_cannot_save([each["saved"] for each in every], saved)
    check_each_keeps_its_own_extra([each["extras"] for each in every], extras)


def check_words_errors_and_folders(every: list[dict[str, Any]]) -> None:
    for process, found in enumerate(every):
        assert found["own"] == process
        assert found["told"] == ["n0", "n1"]
        assert found["first"] == "n0"
        assert found["one fails"][:2] == ("CheckpointError", "process 1: no")
        assert found["both fail"][:2] == ("CheckpointError", "no")
        assert found["damaged"][:2] == ("DamagedCheckpointError", "process 0: no")
        assert found["not shared"].said.startswith("process 1: what process 0 wrote to ")
        assert "put the folder on a file system" in found["not shared"].said
        assert " after 1 s: " in found["not shared"].said
        assert found["taken"].said == ("process 0: taken")
        assert found["left"] == []


def check_one_that_cannot_save(every: list[dict[str, Any]], folder: Path) -> None:
    for found in every:
        assert "another run writes to" in found["held"].said
        for rank in (0, 1):
            told = found[f"disk of {rank}"]
            assert told.said.startswith(f"step 1 was not saved in {folder}/run (step 0 is the last")
            assert f"process {rank}: " in told.said
            assert f"process {1 - rank}" not in told.said
            assert "File too large" in told.said
            assert found[f"after {rank}"] == ([0], [])
        assert found["folder of 0"].said.startswith("process 0: ")
        assert "process 0: save takes a TrainState" in found["no state"].said
        assert found["steps"] == [0, 1]
        assert found["restore"].kind == "DamagedCheckpointError"
        assert found["restore"].said.startswith("process 1: a byte is another one\nStep 0 looks")
        assert "stage of the config differs: 2 in process 0; 3 in process 1" in found["configs"]
        assert found["on disk"].said.startswith("step 0 was not saved in")
        assert "process 1: " in found["on disk"].said
    sums = [
        {name: leaf.checksum for name, leaf in record.leaves.items()}
        for step in (1, 2)
        if (record := records.read(epath.Path(folder / "disk" / str(step))))
    ]
    assert sums[0] == sums[1]
    zero = zerojax.zero(stage=2)
    with Checkpointer(folder / "disk", zero, read_only=True) as checkpointer:
        assert_same(
            checkpointer.restore(zero.abstract_state(create, jax.random.key(0))),
            zero.init(create, jax.random.key(0)),
        )


def check_each_keeps_its_own_extra(every: list[dict[str, Any]], folder: Path) -> None:
    for process, found in enumerate(every):
        assert found["own"] == (10 + process, [0, process], 1)
        assert found["other"] == 11 - process
        said = "step of the state differs between the processes: 0 in process 0; 1 in process 1"
        assert found["step"].said.startswith(said)
        assert found["same"] == {"position": 20}
        assert found["steps"] == [1, 2]
    assert not (folder / "2" / "extra").exists()
    assert inspect(folder).damaged == ()
    zero = zerojax.zero(stage=1)
    abstract = zero.abstract_state(create, jax.random.key(0))
    with Checkpointer(folder, zero, read_only=True) as checkpointer:
        assert [checkpointer.extra(1, process=n)["position"] for n in (0, 1)] == [10, 11]
        with pytest.raises(CheckpointError, match=r"2 processes each saved an extra, and 1"):
            checkpointer.extra(1)
        checkpointer.restore(abstract, 1)
    v1.load(folder / "1", abstract)  # orbax alone, which finds a folder that it does not know
    (folder / "1" / "extra" / "1.json").write_text("{}")
    with (
        Checkpointer(folder, zero, read_only=True) as checkpointer,
        pytest.raises(DamagedCheckpointError, match=r"extra/1\.json has 2 bytes instead of"),
    ):
        checkpointer.extra(1, process=0)


@pytest.mark.sweep
def test_one_that_dies_in_a_save(tmp_path: Path) -> None:
    """JAX ends the other; the last step stays, and one process goes on from there."""
    port = free_port()
    run = fork_server().Process
    both = [run(target=apart.die_in_a_save, args=(i, port, tmp_path)) for i in (0, 1)]
    for process in both:
        process.start()
    both[1].join(LIMIT)
    assert both[1].exitcode == -signal.SIGKILL
    both[0].join(LIMIT)
    assert both[0].exitcode not in (0, None)
    zero = zerojax.zero(stage=1)
    assert [x.name for x in tmp_path.glob("1*")] == ["1.orbax-checkpoint-tmp"]
    with Checkpointer(tmp_path, zero) as checkpointer:
        assert checkpointer.all_steps() == [0]
        state = checkpointer.restore(zero.abstract_state(create, jax.random.key(0)))
        checkpointer.save(1, state)
    assert [x.name for x in tmp_path.glob("1*")] == ["1"]
