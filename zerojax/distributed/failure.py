"""What a process of several leaves for its launcher, and how an exception ends it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

_LAST_WORDS = 1.0
"""Seconds that the other processes have to print an error of all."""
_INTERRUPTED = 130
"""Exit status of what Ctrl-C ended, as shells have it."""


def leave(name: str, index: int, text: str = "") -> None:
    """Writes a file into the folder of the launch, if a launcher made one."""
    folder = os.environ.get("ZEROJAX_RUN_DIR")
    if folder:
        file = Path(folder) / f"{name}.{index}"
        try:
            file.write_text(text)
        except OSError as error:
            file.unlink(missing_ok=True)  # the launcher has stderr; half a traceback helps nobody
            print(f"zerojax: cannot write {name}.{index}: {error}", file=sys.stderr)


def end_at_once(index: int) -> None:
    """Has an exception that nobody catches end this process without JAX's shutdown.

    The shutdown waits 300 s for processes that wait for this one in a collective. The traceback is
    printed as before, and left as ``error.INDEX``, with the time in the first line. The status is
    that of a ``SystemExit``, which Python itself does not pass to the hook, otherwise 1.
    """
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        status = _INTERRUPTED if interrupted else 1
        try:
            if isinstance(error, SystemExit) and isinstance(error.code, int):
                status = error.code & 0xFF
            if not interrupted:
                text = "".join(traceback.format_exception(kind, error, trace))
                leave("error", index, f"{time.time()}\n{text}")
            before(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            if index == 0:  # the coordinator takes the others with it, in the midst of their words
                time.sleep(_LAST_WORDS)
        finally:
            os._exit(status)

    sys.excepthook = end


def ends_at_once() -> bool:
    """Whether :func:`end_at_once` is in force."""
    return sys.excepthook.__module__ == __name__
