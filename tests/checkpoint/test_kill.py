"""SIGKILL at random moments of a real training process that never stops saving."""

import random
import time
from collections import Counter
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from checkpoint import killed
from processes import fork_server

from zerojax.checkpoint import steps_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], Path]:
    """The digest after each step of a run that is left alone, and the compilation cache."""
    root = tmp_path_factory.mktemp("reference")
    process = fork_server().Process(
        target=killed.train, args=(root / "run", root / "log", root / "c")
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    lines = (root / "log").read_text().split("\n")
    digests = {int(line.split()[1]): line.split()[2] for line in lines if "step" in line}
    digests[0] = next(line.split()[2] for line in lines if line.startswith("resumed 0 "))
    assert len(set(digests.values())) == killed.STEPS + 1
    return digests, root / "c"


def test_every_restart_finds_a_complete_checkpoint(
    reference: tuple[dict[int, str], Path],
    tmp_path: Path,
) -> None:
    digests, cache = reference
    rng, kills = random.Random(0), 5
    folder, log = tmp_path / "run", tmp_path / "log"
    log.touch()
    found: Counter[str] = Counter()
    for life in range(kills + 1):
        begin = log.stat().st_size
        finished = last_saved(log)
        process = fork_server().Process(target=killed.train, args=(folder, log, cache))
        process.start()
        if life == kills:
            process.join()
            assert process.exitcode == 0
        else:
            wait_for_moment(process, rng, folder, log)
            process.kill()
            process.join()
            found["during a write"] += any(folder.glob("*.orbax-checkpoint-tmp*"))
            found["during a removal"] += any(folder.glob(".deleted/*"))
        for line in log.read_text()[begin:].splitlines():
            event, step, *digest = line.split()
            if event == "resumed":
                assert int(step) >= finished, f"step {finished} was saved, and lost"
            if digest and len(digest[0]) == 16:
                assert digest[0] == digests[int(step)], line
    assert log.read_text().splitlines()[-1] == f"saved {killed.STEPS}"
    assert [*steps_folder.folders(folder)] == [killed.STEPS - 1, killed.STEPS]
    assert not [*folder.glob("*tmp*"), *folder.glob(".deleted")]
    print(dict(found))


def wait_for_moment(
    process: ForkServerProcess, rng: random.Random, folder: Path, log: Path
) -> None:
    """A moment on the way, in a save some steps on, or at the instant after a commit, when
    retention begins."""
    kind = rng.choice(["start", "save", "save", "save", "commit", "commit"])
    events, steps = log.stat().st_size, [*steps_folder.folders(folder)]
    line, lines = len("step 10 0123456789abcdef\n"), rng.randrange(1, 8)

    def came() -> bool:
        if kind == "commit":
            now = [*steps_folder.folders(folder)]
            return now[-1:] > steps[-1:] and len(now) > 1
        return log.stat().st_size >= events + lines * line

    while kind != "start" and process.is_alive() and not came():
        time.sleep(0.005)
    time.sleep(rng.uniform(0, {"start": 1.5, "save": 0.2, "commit": 0.005}[kind]))


def last_saved(log: Path) -> int:
    lines = [line.split() for line in log.read_text().splitlines()]
    return max((int(line[1]) for line in lines if line[0] == "saved"), default=0)
