"""What a process leaves behind: no process outlives the launcher, however the launcher ends."""

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
STOP = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # mpirun passes on the last, unchanged

_LIBC = ctypes.CDLL(None, use_errno=True)
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PATIENCE = 10.0


def die_with(parent: int, number: int) -> None:
    """Have the kernel send this process a signal when ``parent``, which forked it, ends."""
    _LIBC.prctl(_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """Ids of the living processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = list(children.get(os.getpid(), []))
    for pid in found:  # grows
        found += children.get(pid, [])
    return found


def kill_descendants() -> None:
    """SIGKILL for all descendants, until none is left."""
    until = time.monotonic() + _PATIENCE
    while (left := descendants()) and time.monotonic() < until:
        for pid in left:
            send(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()


def send(pid: int, number: int) -> None:
    """A signal for a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap() -> list[tuple[int, int]]:
    """Ids and exit codes (-N: ended by signal N) of the children that ended, adopted ones too."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def shell_status(code: int) -> int:
    """An exit code as a shell reports it: 128 + N for a process ended by signal N."""
    return 128 - code if code < 0 else code


def guarded(work: Callable[[], int], *, parent: int | None = None) -> int:
    """The status of ``work``, done in a child process whose descendants end with this process.

    Two processes watch each other: this one passes signals on, and kills what is left if the child
    is killed; the child, in a session of its own, learns of this one's death by ``PARENT_DIED``.
    ``work`` is called with the signals blocked, and waits for them. A ``UsageError`` is its message
    and status 2.

    Args:
      work: What to do; it returns an exit status.
      parent: End all when this process is no longer the parent; None: never look.
    """
    asking = {*STOP, signal.SIGINT}
    ignored = {each for each in asking if signal.getsignal(each) is signal.SIG_IGN}  # nohup
    signals = {*asking, signal.SIGCHLD, PARENT_DIED} - ignored
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
        got = signal.sigtimedwait(signals, 1.0)
        if parent is not None and os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)  # the child sees that
        for pid, code in reap():
            if pid == child:
                kill_descendants()
                return shell_status(code)
        # After SIGSTOP and SIGCONT Python returns a signal that did not come.
        if got is not None and got.si_signo in signals - {signal.SIGCHLD, PARENT_DIED}:
            send(child, got.si_signo)
