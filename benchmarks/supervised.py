"""Launched runs: the training, its output, and its end."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self


def training(folder: Path, steps: int, pause: float, every: int = 20) -> list[str]:
    """The program for a launch, which saves in ``folder``; ``pause``: seconds after each step."""
    program = ["-m", "benchmarks.launch_training", str(folder), "--steps", str(steps)]
    return [*program, "--pause", str(pause), "--every", str(every)]


def launch(*words: str) -> list[str]:
    """The command of a launch."""
    return [sys.executable, "-m", "zerojax", "launch", *words]


class Output:
    """Output of a run, in a file.

    Args:
      path: The file; need not exist.
      ended: Whether the run is over, and nothing more is to be waited for.
    """

    def __init__(self, path: Path, ended: Callable[[], bool] = lambda: False) -> None:
        self.path, self._ended = path, ended

    def text(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def wait(self, pattern: str, count: int = 1, seconds: float = 300.0) -> list[str]:
        """The first group of each match, as soon as there are as many."""
        until = time.monotonic() + seconds
        while True:
            last = self._ended() or time.monotonic() > until
            if len(found := re.findall(pattern, self.text())) >= count:
                return found
            if last:
                raise TimeoutError(f"no {pattern!r} in\n{self.text()}")
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def seconds_until_gone(pids: Iterable[int], most: float = 400.0) -> float:
    """Until none of these processes is alive; ``most`` where some still are then."""
    start = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() - start < most:
        time.sleep(0.02)
    return time.monotonic() - start


class Process(NamedTuple):
    """A process of a training, and the folder that its attempt has."""

    pid: int
    run_dir: Path


class Training:
    """A launch of the training, which is killed at the end of a ``with`` block.

    Args:
      folder: Of its output, ``NAME.out``, and of ``checkpoints``.
      name: Of this launch.
      options: Of the launch.
      count: Of processes.
      steps: To make in all.
      pause: Seconds after each.
      on: Words before the command.
      environ: Variables besides those of this process.
    """

    EVERY = 5  # steps between saves

    def __init__(
        self,
        folder: Path,
        name: str,
        *options: str,
        count: int,
        steps: int,
        pause: float,
        on: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.count, self.checkpoints = count, folder / "checkpoints"
        program = training(self.checkpoints, steps, pause, self.EVERY)
        self.output = Output(folder / f"{name}.out", lambda: self.launcher.poll() is not None)
        with self.output.path.open("wb") as out:
            self.launcher = subprocess.Popen(
                [*on, *launch(*options, *program)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.kill()
        self.launcher.wait()

    def processes(self, but: Iterable[Path] = ()) -> list[Process]:
        """The processes in the order of their numbers, as soon as all have begun.

        Args:
          but: The folders of earlier attempts.
        """
        until = time.monotonic() + 300
        while len(found := self._processes(set(but))) < self.count:
            if time.monotonic() > until or self.launcher.poll() is not None:
                raise TimeoutError(f"no {self.count} processes:\n{self.output.text()}")
            time.sleep(0.01)
        return [process for _, process in sorted(found.items())]

    def _processes(self, but: set[Path]) -> dict[int, Process]:
        found = {}
        for pid in self.alive():
            try:
                environ = Path(f"/proc/{pid}/environ").read_text()
            except OSError:
                continue
            variables = dict(each.partition("=")[::2] for each in environ.split("\0"))
            if "ZEROJAX_PROCESS_ID" in variables:
                process = Process(pid, Path(variables["ZEROJAX_RUN_DIR"]))
                if process.run_dir not in but:
                    found[int(variables["ZEROJAX_PROCESS_ID"])] = process
        return found

    def alive(self) -> list[int]:
        """Ids of the launcher and of all processes below it that have its words, whoever has
        adopted them."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # ended meanwhile
                if str(self.checkpoints) in command.read_text():
                    found.append(int(command.parent.name))
        return found

    def saved_steps(self) -> list[int]:
        """The steps that are saved, 0 for none."""
        return [0, *sorted(int(each.name) for each in self.checkpoints.glob("[0-9]*[0-9]"))]

    def half_written(self) -> int | None:
        """The step that is half written; an attempt that was killed leaves one to the next save."""
        found = [int(x.name.partition(".")[0]) for x in self.checkpoints.glob("*.orbax-*-tmp")]
        return found[0] if found else None

    def attempts(self) -> list[str]:
        """The output of each attempt."""
        return self.output.text().split("zerojax launch: attempt ")

    def last_words(self) -> str:
        """The last message of the launcher; "" for none."""
        _, said, words = self.output.text().rpartition("zerojax launch: ")
        return words if said else ""


def checksum(text: str) -> str:
    """Returns the checksum of the final parameters; "" if processes differ or did not end."""
    ends = set(re.findall(r"end: (\w+)", text))
    return ends.pop() if len(ends) == 1 else ""


def began_after(text: str) -> int | None:
    """The step after which an attempt began, as all its processes say; None: it did not."""
    found = set(map(int, re.findall(r"begins after step (\d+)", text)))
    return found.pop() if len(found) == 1 else None


def losses(text: str) -> dict[int, set[str]]:
    """The losses of each step in all processes; float32, to the bit."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss (\S+)\n", text):
        found.setdefault(int(step), set()).add(loss)
    return found


class Way(NamedTuple):
    """Succession of two attempts.

    Attributes:
      after: The step after which it began.
      lost: Number of steps that were repeated.
      problems: Violations of what is expected.
    """

    after: int
    lost: int
    problems: list[str]


def way_on(before: str, following: str, saved: int, right: dict[int, set[str]]) -> Way:
    """Compares the second of two attempts with the first.

    Args:
      before: The output of the first.
      following: That of the second.
      saved: The last step that was saved before the first one ended.
      right: The losses of an uninterrupted run.
    """
    after, problems = began_after(following), []
    if after is None:
        return Way(-1, -1, ["the next attempt did not begin"])
    if after < saved:
        problems.append(f"step {saved} was saved, and is lost")
    if wrong := [step for step, each in losses(following).items() if each != right.get(step)]:
        problems.append(f"the loss of step {wrong[0]} is not the uninterrupted run's")
    return Way(after, max(losses(before), default=after) - after, problems)


class Results(NamedTuple):
    """Outcome of faults.

    Attributes:
      rows: Of a table.
      problems: What is not as expected.
    """

    rows: Sequence[Sequence[str]]
    problems: list[str]


def load() -> str:
    """The load of the machine, for a record."""
    return f", load average {os.getloadavg()[2]:.1f} in the last 15 minutes"
