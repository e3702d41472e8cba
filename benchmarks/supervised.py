"""Launches of ``benchmarks.launch_training`` that a benchmark disturbs and compares.

    with Training(folder, "first", "--nproc-per-node", "2", count=2, steps=20, pause=0.1) as run:
        run.launcher.wait(300)
    way_on(before, run.output.text(), saved, right)

:class:`Training` starts a launch and finds its processes and saves; :func:`way_on` compares the
output of an attempt with that of the attempt before it and with an uninterrupted run.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self


def training(folder: Path, steps: int, pause: float, every: int = 20, form: str = "") -> list[str]:
    """The command that a launch runs; it saves in ``folder``, every ``every`` steps, and sleeps for
    ``pause`` seconds after each step. The state has a form of the program's ``FORMS``."""
    program = ["-m", "benchmarks.launch_training", str(folder), "--steps", str(steps)]
    program += ["--form", form] if form else []
    return [*program, "--pause", str(pause), "--every", str(every)]


def launch(*words: str) -> list[str]:
    """The command ``zerojax launch`` with these arguments."""
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
        """Waits for ``count`` matches of a pattern, and returns the first group of each match.

        Raises:
          TimeoutError: The run is over or the seconds have passed, with fewer matches.
        """
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
    """Waits until none of these processes is alive, ``most`` seconds at the longest, and returns
    the seconds that passed."""
    start = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() - start < most:
        time.sleep(0.02)
    return time.monotonic() - start


class Process(NamedTuple):
    """A process of a training, and the run folder of the attempt that it belongs to."""

    pid: int
    run_dir: Path


class Training:
    """A launch of the training, which is killed at the end of a ``with`` block.

    Args:
      folder: Where the output is written, as ``NAME.out``, and the saves, below ``checkpoints``.
      name: The name of this launch, for its output.
      options: Options of ``zerojax launch``.
      count: The number of processes.
      steps: The steps after which the training ends, those of earlier launches included.
      pause: Seconds of sleep after each step.
      form: The form of the state; "" for a ``TrainState``.
      on: Words before the command, such as those that run it in a network namespace.
      environ: Environment variables besides those of this process.
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
        form: str = "",
        on: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.count, self.checkpoints = count, folder / "checkpoints"
        program = training(self.checkpoints, steps, pause, self.EVERY, form)
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
        """Waits until all processes have begun, and returns them in the order of their numbers.

        Args:
          but: Run folders of earlier attempts, whose processes do not count.
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
        """Ids of all processes that have the folder of saves on their command line: the launcher
        and what it started, orphans included."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # ended meanwhile
                if str(self.checkpoints) in command.read_text():
                    found.append(int(command.parent.name))
        return found

    def saved_steps(self) -> list[int]:
        """The steps that are saved, after a 0 for the beginning."""
        return [0, *sorted(int(each.name) for each in self.checkpoints.glob("[0-9]*[0-9]"))]

    def half_written(self) -> int | None:
        """The step whose save is half written; None if there is none.

        An attempt that was killed in a save leaves one, until the next save."""
        found = [int(x.name.partition(".")[0]) for x in self.checkpoints.glob("*.orbax-*-tmp")]
        return found[0] if found else None

    def attempts(self) -> list[str]:
        """The output of each attempt; the launcher announces all but the first."""
        return self.output.text().split("zerojax launch: attempt ")

    def last_words(self) -> str:
        """The last message that the launcher printed, and what follows it; "" for none."""
        _, said, words = self.output.text().rpartition("zerojax launch: ")
        return words if said else ""


def undisturbed(folder: Path, count: int, steps: int, form: str = "") -> str:
    """Trains without a fault, from the newest save in the folder to the end; returns the output."""
    options = ("--nproc-per-node", str(count))
    with Training(folder, "end", *options, count=count, steps=steps, pause=0.0, form=form) as run:
        if status := run.launcher.wait(300):
            raise RuntimeError(f"status {status}:\n{run.output.text()}")
        return run.output.text()


def checksum(text: str) -> str:
    """Returns the checksum of the final state; "" if processes differ or did not end."""
    ends = set(re.findall(r"end: (\w+)", text))
    return ends.pop() if len(ends) == 1 else ""


def began_after(text: str) -> int | None:
    """The step after which an attempt began; None if it did not begin or its processes disagree."""
    found = set(map(int, re.findall(r"begins after step (\d+)", text)))
    return found.pop() if len(found) == 1 else None


def losses(text: str) -> dict[int, set[str]]:
    """The losses that any process printed for each step, as text: equal texts are equal floats."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) loss (\S+)\n", text):
        found.setdefault(int(step), set()).add(loss)
    return found


class Way(NamedTuple):
    """The way on from one attempt to the next.

    Attributes:
      after: The step after which the second attempt began; -1 if it did not begin.
      lost: The steps of the first attempt that the second has to repeat; -1 if it did not begin.
      problems: What is not as expected, a sentence each.
    """

    after: int
    lost: int
    problems: list[str]


def way_on(before: str, following: str, saved: int, right: dict[int, set[str]]) -> Way:
    """Compares the second of two attempts with the first.

    Args:
      before: The output of the first attempt.
      following: The output of the second.
      saved: The last step that was saved before the first attempt ended.
      right: The losses of an uninterrupted run, from :func:`losses`.
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
    """The outcome of some faults.

    Attributes:
      rows: Rows of a table, the headings first.
      problems: What is not as expected, a sentence each.
    """

    rows: Sequence[Sequence[str]]
    problems: list[str]


def load() -> str:
    """The load of the machine, for a record."""
    return f", load average {os.getloadavg()[2]:.1f} in the last 15 minutes"
