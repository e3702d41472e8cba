"""Processes that start and end together."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from zerojax.launch import descent
from zerojax.launch.error import UsageError, in_a_line
from zerojax.launch.failure import Outcome
from zerojax.launch.relay import Source, Terminal

PREEMPTED = 75
STALLED = 76
_LAGGING_SECONDS = 15.0  # for mpirun to end once a machine has failed
_READER_SECONDS = 5.0  # for the reader of the output, once the launcher is asked to end
_EARLY_SECONDS = 5.0  # for the others, once a process has ended without the end of its script


class Process(NamedTuple):
    """One process to start.

    Attributes:
      number: Its number among the processes of the job; None for mpirun, which forwards the output
        and the failures of other launchers.
      command: Program and arguments.
      variables: Variables of the process beside the launcher's environment.
      cpus: The CPUs that the process may use; None: the CPUs of the launcher.
      log: File for the process's output.
      joined: File ``joined.N`` that must exist when the process ends with status 0; otherwise the
        end is a failure. A file ``ended.N`` beside it says that the script has ended.
      error: File with the time and the traceback of the exception that ended the process.
    """

    number: int | None
    command: list[str]
    variables: dict[str, str]
    cpus: frozenset[int] | None = None
    log: Path | None = None
    joined: Path | None = None
    error: Path | None = None

    @property
    def name(self) -> str:
        """The name in messages."""
        return "mpirun" if self.number is None else f"process {self.number}"

    @property
    def prefix(self) -> str:
        """The prefix of the process's lines on the terminal."""
        return "" if self.number is None else f"[{self.number}] "


class EndedProcess(NamedTuple):
    """One process that ended by itself, or when asked to stop."""

    process: Process
    code: int
    pid: int
    at: float


class Group:
    """Processes started together; the first failure ends all.

    ``run`` is called with the signals of ``descent.guarded`` blocked.
    """

    def __init__(
        self,
        processes: list[Process],
        environ: Mapping[str, str],
        grace: float,
        stop: signal.Signals = signal.SIGTERM,
        ending: float = 3.0,
    ) -> None:
        """Stores the processes to start, and the manner of stopping them.

        Args:
          processes: The processes to start.
          environ: The environment of all of them.
          grace: Seconds from the signal ``stop`` to SIGKILL when the launcher is asked to stop.
          stop: The signal by which the processes are asked to save and end.
          ending: Seconds from SIGTERM to SIGKILL after a failure, or from Ctrl-C.
        """
        self._processes, self._environ = processes, environ
        self._grace, self._stop, self._ending = grace, stop, ending
        self._running: dict[int, Process] = {}
        self._ended: list[EndedProcess] = []
        self._failed: EndedProcess | None = None
        self._early: EndedProcess | None = None
        self._asked: signal.Signals | None = None
        self._kill_at: float | None = None
        self._late: list[str] = []
        self._terminal = Terminal()
        self._sources: list[Source] = []
        self._stderr: dict[int, Source] = {}

    def run(self) -> Outcome:
        """Starts the processes, and waits until no descendant is left."""
        with contextlib.ExitStack() as stack:
            try:
                self._start_all(stack)
                for source in self._sources:  # a thread before would be forked with its locks
                    source.start()
                while self._running:
                    self._wait()
            finally:
                descent.kill_descendants()
            self._pass_on_the_rest()
        return self._outcome()

    def _start_all(self, stack: contextlib.ExitStack) -> None:
        """Raises UsageError if this machine lacks a resource for a process, such as open files."""
        for process in self._processes:
            try:
                self._start(process, stack)
            except OSError as error:
                is_file_limit = error.errno in (errno.EMFILE, errno.ENFILE)
                raise UsageError(
                    f"{process.name} of {len(self._processes)} cannot be started: "
                    f"{in_a_line(error)}" + "; raise `ulimit -n`" * is_file_limit
                ) from None

    def _start(self, process: Process, stack: contextlib.ExitStack) -> None:
        log: IO[bytes] | None = None
        if process.log is not None:
            process.log.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(process.log.open("ab", buffering=0))
        parent = os.getpid()

        def prepare_child() -> None:
            descent.die_with(parent, signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            if process.cpus is not None:
                os.sched_setaffinity(0, process.cpus)

        prefix = process.prefix.encode()
        stdout = Source(self._terminal, prefix, 1, log)
        stderr = Source(self._terminal, prefix, 2, log, [] if process.number is None else None)
        child = subprocess.Popen(
            process.command,
            bufsize=0,
            env={**self._environ, **process.variables},
            stdin=subprocess.DEVNULL if process.number else None,  # for mpirun or process 0
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare_child,
        )
        stdout.pipe, stderr.pipe = child.stdout, child.stderr
        self._sources += [stdout, stderr]
        child.returncode = 0  # `descent.reap` waits for all
        self._running[child.pid], self._stderr[child.pid] = process, stderr

    def _wait(self) -> None:
        signals = {*descent.STOP, signal.SIGINT, signal.SIGCHLD, descent.PARENT_DIED}
        # mpirun does not end by itself if a machine is cut off.
        if self._kill_at is None and self._reported():
            self._kill_at = time.monotonic() + _LAGGING_SECONDS
        if self._kill_at is None and self._early and time.time() > self._early.at + _EARLY_SECONDS:
            self._fail(self._early)
        timeout = 1.0 if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        received = signal.sigtimedwait(signals, timeout)
        # After SIGSTOP and SIGCONT Python returns a signal that was never sent.
        if received is not None and received.si_signo in signals:
            self._take(signal.Signals(received.si_signo))
        ended = [(pid, code) for pid, code in descent.reap() if pid in self._running]
        for pid, code in sorted(ended, key=lambda pair: pair[1]):  # a kill explains later failures
            self._note(EndedProcess(self._running.pop(pid), code, pid, time.time()))
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            descent.kill_descendants()  # reaps
            if self._failed is None and self._asked != descent.PARENT_DIED:
                self._late = [process.name for process in self._running.values()]
            for pid, process in self._running.items():
                self._ended.append(EndedProcess(process, -signal.SIGKILL, pid, time.time()))
            self._running.clear()

    def _pass_on_the_rest(self) -> None:
        """Waits until the output is written, however slow its reader, unless asked to end."""
        self._terminal.is_finishing = True
        signals = {*descent.STOP, signal.SIGINT, descent.PARENT_DIED}
        while reading := [source for source in self._sources if source.is_alive()]:
            if signal.sigpending() & signals or self._asked == descent.PARENT_DIED:
                break
            reading[0].join(0.2)
        self._terminal.hurry(_READER_SECONDS)
        for source in self._sources:
            source.join()
        self._terminal.end_line()

    def _take(self, got: signal.Signals) -> None:
        """Handles a signal."""
        now = time.monotonic()
        if got == descent.PARENT_DIED or (got == signal.SIGINT and self._asked is not None):
            self._asked, self._kill_at = self._asked or got, now
        elif got == signal.SIGINT or (got in descent.STOP and self._asked is None):
            self._asked = got
            is_ctrl_c = got == signal.SIGINT
            self._signal(signal.SIGINT if is_ctrl_c else self._stop)
            if self._failed is None:
                self._kill_at = now + (self._ending if is_ctrl_c else self._grace)

    def _note(self, ended: EndedProcess) -> None:
        """Handles a process that ended by itself, or when asked."""
        self._ended.append(ended)
        if self._failed is not None or self._asked == signal.SIGINT:
            return
        if ended.code == PREEMPTED and self._asked is None and self._kill_at is None:
            self._kill_at = time.monotonic() + self._grace  # all leave together
        elif self._is_failure(ended):
            self._fail(ended)
        elif self._asked is None and self._early is None and _is_early(ended):
            self._early = ended  # the others may be about to end so too

    def _fail(self, ended: EndedProcess) -> None:
        """Ends the others, because a process has failed."""
        self._failed = ended
        if self._asked is not None:  # the others may be saving
            return
        self._kill_at = time.monotonic() + self._ending
        if ended.code != STALLED:  # the others' watchdogs write their stacks
            self._signal(signal.SIGTERM)

    def _is_failure(self, ended: EndedProcess) -> bool:
        if ended.code == 0:
            return not (ended.process.joined is None or ended.process.joined.exists())
        was_asked = self._asked is not None and ended.code in (-self._stop, -signal.SIGTERM)
        return ended.code != PREEMPTED and not was_asked

    def _signal(self, number: int) -> None:
        for pid in self._running:
            descent.send(pid, number)

    def _outcome(self) -> Outcome:
        if self._asked == signal.SIGINT:
            return Outcome(128 + signal.SIGINT, "Ctrl-C", again=False)
        failure = self._first_failure()
        if failure is not None:
            return failure._replace(again=failure.again and self._asked is None)
        codes = [each.code for each in self._ended]
        status = descent.shell_status(next((c for c in codes if c not in (0, PREEMPTED)), 0))
        if status == 0 and PREEMPTED in codes:
            status, why = PREEMPTED, "all processes saved and ended: preempted"
        else:
            why = "ended as asked" if status else ""
        return Outcome(status, why, again=self._asked is None)

    def _first_failure(self) -> Outcome | None:
        """Returns the earliest failure that other launchers reported; if none did, the group's."""
        if reported := self._reported():
            return min(reported, key=lambda each: each.failed_at)
        if self._late:
            why = f"{', '.join(self._late)} did not end within {self._grace:g} s: killed"
            return Outcome(128 + signal.SIGKILL, why, failed_at=time.time())
        if self._failed is None:
            return None
        if self._early is not None:  # the others missed that process
            return self._failure(self._early)
        candidates = [self._failed]
        if self._failed.code != -signal.SIGKILL:  # a kill explains the exceptions
            candidates += [each for each in self._ended if each.code > 0 and _error(each)[1]]
        return min(map(self._failure, candidates), key=lambda each: each.failed_at)

    def _reported(self) -> list[Outcome]:
        return [failure for source in self._stderr.values() for failure in source.failures or ()]

    def _failure(self, ended: EndedProcess) -> Outcome:
        process = ended.process
        if ended.code == 0:
            if ended is not self._early:
                why = (
                    f"{process.name}, one of several, has ended: script never calls "
                    "zerojax.init_distributed()"
                )
                return Outcome(2, why, again=False, failed_at=ended.at)
            why = (
                f"{process.name} ended first, with status 0, before the end of its script "
                "(os._exit(0) or the like): let the script end in all processes, or end with "
                "another status"
            )
            return Outcome(1, why, failed_at=ended.at)
        verb = "ended" if process.number is None else "failed first"
        why = f"{process.name} {verb}: {_ending(ended.code)}"
        at, text = _error(ended)
        if not text and process.number is not None:
            tail = self._stderr[ended.pid].tail.decode(errors="replace")
            start = tail.find("Traceback (most recent call last):")
            text = tail[start:] if start >= 0 else ""
        text = "".join(f"{process.prefix}{line}\n" for line in text.splitlines())
        status = descent.shell_status(ended.code)
        return Outcome(status, why, failed_at=at or ended.at, text=text)


def _is_early(ended: EndedProcess) -> bool:
    """Returns whether a process ended with status 0, but without the end of its script."""
    if ended.code != 0 or (joined := ended.process.joined) is None:
        return False
    return not joined.with_stem("ended").exists()


def _error(ended: EndedProcess) -> tuple[float, str]:
    """Returns time and traceback of the exception that ended a process; 0.0 and "" if unknown."""
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
