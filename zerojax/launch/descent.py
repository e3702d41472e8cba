"""Cleanup of descendants: no process outlives the launcher, however the launcher ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from zerojax.launch.error import UsageError
from zerojax.launch.failure import say

PARENT_DIED = signal.SIGUSR2
STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # mpirun forwards SIGUSR1 unchanged

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PATIENCE = 10.0


def die_with(parent: int, number: int) -> None:
    """Asks the kernel to send this process a signal when ``parent``, which forked it, ends."""
    _LIBC.prctl(_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Sets this process as the parent of all descendants whose parent ends."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Returns the ids of the living descendants of this process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    pids = list(children.get(os.getpid(), []))
    for pid in pids:  # the list grows during the loop
        pids += children.get(pid, [])
    return pids


def kill_descendants() -> None:
    """Sends SIGKILL to all descendants, until none is left or 10 s have passed."""
    deadline = time.monotonic() + _PATIENCE
    while (remaining := descendants()) and time.monotonic() < deadline:
        for pid in remaining:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """Returns ids and exit codes (-N: signal N) of the children that ended, adopted ones too."""
    ended = []
    with contextlib.suppress(ChildProcessError):  # none is left
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], os.waitstatus_to_exitcode(child[1])))
    return ended


def shell_status(code: int) -> int:
    """Converts an exit code to a shell's status: 128 + N for a process ended by signal N."""
    return 128 - code if code < 0 else code


def guarded(work: Callable[[], int], *, parent: int | None = None) -> int:
    """Runs ``work`` in a child process whose descendants end with this process; returns the status.

    Two processes watch each other: this process forwards signals, and kills the remaining
    descendants if the child is killed; the child, in a separate session, receives ``PARENT_DIED``
    when this process dies. ``work`` is called with the signals blocked, and waits for them. A
    ``UsageError`` ends in its message and status 2.

    Args:
      work: The function to run; it returns an exit status.
      parent: End all when the process with this id is no longer the parent; None: never check.
    """
    stop_signals = {*STOP, signal.SIGINT}
    ignored = {each for each in stop_signals if signal.getsignal(each) is signal.SIG_IGN}  # nohup
    signals = {*stop_signals, signal.SIGCHLD, PARENT_DIED} - ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    adopt_orphans()
    me, child = os.getpid(), os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            die_with(me, PARENT_DIED)
            adopt_orphans()
            status = work()
        except UsageError as error:
            status = 2
            say(str(error))
        except BaseException:
            traceback.print_exc()
        finally:
            kill_descendants()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    while True:
        received = signal.sigtimedwait(signals, 1.0)
        if parent is not None and os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)  # the child then receives PARENT_DIED
        for pid, code in reap():
            if pid == child:
                kill_descendants()
                return shell_status(code)
        # After SIGSTOP and SIGCONT Python returns a signal that was never sent.
        if received is not None and received.si_signo in signals - {signal.SIGCHLD, PARENT_DIED}:
            send(child, received.si_signo)
