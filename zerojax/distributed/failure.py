"""Files that a process of several leaves for its launcher, and its exit on an exception."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_LAST_WORDS = 5.0
"""Seconds at most that the other processes have to print an error that all raise."""
_INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


def leave(name: str, index: int, text: str = "") -> None:
    """Writes a file into the folder of the launch, if a launcher created one."""
    folder = os.environ.get("ZEROJAX_RUN_DIR")
    if folder:
        file = Path(folder) / f"{name}.{index}"
        try:
            file.write_text(text)
        except OSError as error:
            file.unlink(missing_ok=True)  # no half traceback: the launcher has stderr
            print(f"zerojax: cannot write {name}.{index}: {error}", file=sys.stderr)


def end_at_once(index: int, count: int) -> None:
    """Sets an exception hook that ends this process without JAX's shutdown.

    The shutdown waits 300 s for processes that wait for this process in a collective. The hook
    prints the traceback as before, and leaves it as ``error.INDEX``, with the time in the first
    line. The exit status is 130 after Ctrl-C, the code of a ``SystemExit`` (which Python itself
    does not pass to the hook), and 1 otherwise.
    """
    from zerojax.distributed.coordinator import part  # loads JAX, which launchers do without

    previous_hook = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        status = _INTERRUPTED if interrupted else 1
        try:
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                status = error.code & 0xFF
            if not interrupted:
                text = "".join(traceback.format_exception(kind, error, trace))
                leave("error", index, f"{time.time()}\n{text}")
            previous_hook(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            part(index, count - 1, _LAST_WORDS)  # the others may still be printing
        finally:
            os._exit(status)

    sys.excepthook = end


def end_with(error: Exception) -> NoReturn:
    """Prints an error as an uncaught exception, and ends this process with status 1.

    Another thread calls this function where the main thread may wait forever, in a program that
    the other processes do not run.
    """
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stderr.flush()
    os._exit(1)


def ends_at_once() -> bool:
    """Returns whether the hook of :func:`end_at_once` is set."""
    return sys.excepthook.__module__ == __name__
