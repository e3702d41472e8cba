"""Processes that live and die together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import IO, NamedTuple

from zerojax.launch import descent
from zerojax.launch.relay import Relay, Source

PREEMPTED = 75
STALLED = 76
_ENDING_SECONDS = 3.0  # from SIGTERM to SIGKILL after a failure, or from Ctrl-C
_DRAIN_SECONDS = 5.0


class Process(NamedTuple):
    """One process to start.

    Attributes:
      name: In messages: "process 2".
      prefix: What its lines begin with on the terminal: "[2] ".
      command: Program and arguments.
      environ: Its whole environment.
      cpus: The CPUs that it may use; None: those of the launcher.
      stdin: Whether it has the launcher's standard input.
      log: A file for its output.
      joined: A file that exists before the process ends with status 0, or something is wrong.
      error: A file that has the time and the traceback of the exception that ended the process.
      shown: Whether its error is shown; a launcher that fails has shown those of its processes.
    """

    name: str
    prefix: str
    command: list[str]
    environ: dict[str, str]
    cpus: frozenset[int] | None = None
    stdin: bool = False
    log: Path | None = None
    joined: Path | None = None
    error: Path | None = None
    shown: bool = True


class Outcome(NamedTuple):
    """How a group ended.

    Attributes:
      status: The exit status of the whole.
      why: The reason, in words; "" for status 0.
      again: Whether another attempt may help.
    """

    status: int
    why: str
    again: bool


class Ended(NamedTuple):
    """One process that ended by itself, or when asked to stop."""

    process: Process
    code: int
    pid: int


NEVER_JOINED = "script never calls zerojax.init_distributed()"


class Group:
    """Processes started together; the first failure ends all.

    ``run`` is called with the signals of ``descent.guarded`` blocked.
    """

    def __init__(
        self, processes: list[Process], grace: float, stop: signal.Signals = signal.SIGTERM
    ) -> None:
        """Takes what to start, and how to stop.

        Args:
          processes: What to start.
          grace: Seconds from the signal ``stop`` to SIGKILL when the launcher is asked to stop.
          stop: The signal by which the processes are asked to save and end.
        """
        self._processes, self._grace, self._stop = processes, grace, stop
        self._running: dict[int, Process] = {}
        self._ended: list[Ended] = []
        self._failed: Ended | None = None
        self._asked: signal.Signals | None = None
        self._kill_at: float | None = None
        self._killed = False
        self._relay = Relay()
        self._stderr: dict[int, Source] = {}

    def run(self) -> Outcome:
        """Start, wait for the end, and show the first error."""
        with contextlib.ExitStack() as stack:
            try:
                for process in self._processes:
                    self._start(process, stack)
                self._relay.start()
                while self._running:
                    self._wait()
            finally:
                descent.kill_descendants()
            self._relay.join(_DRAIN_SECONDS)
        return self._outcome()

    def _start(self, process: Process, stack: contextlib.ExitStack) -> None:
        log: IO[bytes] | None = None
        if process.log is not None:
            process.log.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(process.log.open("wb", buffering=0))
        parent = os.getpid()

        def before() -> None:
            descent.die_with(parent, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if process.cpus is not None:
                os.sched_setaffinity(0, process.cpus)

        prefix = process.prefix.encode()
        stderr = Source(prefix, 2, log)
        pipes = [self._relay.pipe(Source(prefix, 1, log)), self._relay.pipe(stderr)]
        try:
            started = subprocess.Popen(
                process.command,
                env=process.environ,
                stdin=None if process.stdin else subprocess.DEVNULL,
                stdout=pipes[0],
                stderr=pipes[1],
                start_new_session=True,
                preexec_fn=before,
            )
        finally:
            for pipe in pipes:
                os.close(pipe)
        started.returncode = 0  # `descent.reap` waits for all
        self._running[started.pid], self._stderr[started.pid] = process, stderr

    def _wait(self) -> None:
        signals = {*descent.STOP, signal.SIGINT, signal.SIGCHLD, descent.PARENT_DIED}
        left = 3600.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        got = signal.sigtimedwait(signals, left)
        if got is not None:
            self._take(signal.Signals(got.si_signo))
        ours = [(pid, code) for pid, code in descent.reap() if pid in self._running]
        for pid, code in sorted(ours, key=lambda each: each[1]):  # a kill explains what follows it
            self._note(Ended(self._running.pop(pid), code, pid))
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._killed = True
            descent.kill_descendants()  # reaps
            for pid, process in self._running.items():
                self._ended.append(Ended(process, -signal.SIGKILL, pid))
            self._running.clear()

    def _take(self, got: signal.Signals) -> None:
        """A signal that came."""
        now = time.monotonic()
        if got == descent.PARENT_DIED or (got == signal.SIGINT and self._asked is not None):
            self._asked, self._kill_at = self._asked or got, now
        elif got == signal.SIGINT or (got in descent.STOP and self._asked is None):
            self._asked = got
            ctrl_c = got == signal.SIGINT
            self._signal(signal.SIGINT if ctrl_c else self._stop)
            if self._failed is None:
                self._kill_at = now + (_ENDING_SECONDS if ctrl_c else self._grace)

    def _note(self, ended: Ended) -> None:
        """A process that ended by itself, or when asked."""
        self._ended.append(ended)
        now = time.monotonic()
        if self._failed is not None or self._asked == signal.SIGINT:
            return
        if ended.code == PREEMPTED and self._asked is None and self._kill_at is None:
            self._kill_at = now + self._grace  # all leave together
        elif self._is_failure(ended):
            self._failed = ended
            self._kill_at = now + _ENDING_SECONDS
            if ended.code != STALLED:  # the others' watchdogs write their stacks
                self._signal(signal.SIGTERM)

    def _is_failure(self, ended: Ended) -> bool:
        if ended.code == 0:
            return not (ended.process.joined is None or ended.process.joined.exists())
        asked_to = self._asked is not None and ended.code in (-self._stop, -signal.SIGTERM)
        return ended.code != PREEMPTED and not asked_to

    def _signal(self, number: int) -> None:
        for pid in self._running:
            descent.send(pid, number)

    def _outcome(self) -> Outcome:
        if self._asked == signal.SIGINT:
            return Outcome(128 + signal.SIGINT, "Ctrl-C", False)
        failed = self._first_failure()
        if failed is None:
            codes = [each.code for each in self._ended]
            status = descent.shell_status(next((c for c in codes if c not in (0, PREEMPTED)), 0))
            if status:
                late = "did not end within" if self._killed else "were asked to end, and took"
                why = f"processes {late} {self._grace:g} s"
            elif PREEMPTED in codes:
                status, why = PREEMPTED, "all processes saved and ended: preempted"
            else:
                return Outcome(0, "", False)
            return Outcome(status, why, self._asked is None)
        if failed.code == 0:
            say(f"{failed.process.name}, one of several, has ended: {NEVER_JOINED}")
            return Outcome(2, NEVER_JOINED, False)
        why = f"{failed.process.name} failed first: {_ending(failed.code)}"
        if failed.process.shown:
            self._show(failed, why)
        return Outcome(descent.shell_status(failed.code), why, self._asked is None)

    def _first_failure(self) -> Ended | None:
        """Who failed first: the earliest exception, otherwise who ended first."""
        if self._failed is None or self._failed.code == -signal.SIGKILL:
            return self._failed
        times = {t: each for each in self._ended if each.code > 0 and (t := _error(each)[0])}
        return times[min(times)] if times else self._failed

    def _show(self, failed: Ended, why: str) -> None:
        """The first error once more, behind all that the processes said."""
        text = _error(failed)[1]
        if not text:
            tail = self._stderr[failed.pid].tail.decode(errors="replace")
            start = tail.find("Traceback (most recent call last):")
            text = tail[start:] if start >= 0 else ""
        lines = [failed.process.prefix + line for line in text.splitlines()]
        say("\n".join([why, *lines]))


def say(text: str) -> None:
    """A message of the launcher's own, on stderr."""
    with contextlib.suppress(OSError):
        os.write(2, f"zerojax launch: {text}\n".encode(errors="replace"))


def _error(ended: Ended) -> tuple[float, str]:
    """Time and traceback of the exception that ended a process; 0.0 and "" where unknown."""
    if ended.process.error is None or not ended.process.error.exists():
        return 0.0, ""
    first, _, text = ended.process.error.read_text(errors="replace").partition("\n")
    try:
        return float(first), text
    except ValueError:
        return 0.0, text


def _ending(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"status {code}" + ", its watchdog's" * (code == STALLED)
