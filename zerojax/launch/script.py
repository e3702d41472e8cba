"""``python -m zerojax.launch.script train.py ...``: runs a script and keeps its exit status.

Python does not report the status in ``SystemExit`` before its shutdown, in which JAX waits for the
other processes.
"""

import runpy
import sys
from pathlib import Path

_OWN_FILES = {__file__, runpy.__file__, "<frozen runpy>"}


def run(words: list[str]) -> None:
    """Runs ``train.py ...`` or ``-m module ...`` as python does.

    If one of several processes ends by an exception, ``sys.excepthook`` is called, also for a
    ``SystemExit`` with another status than 0 and ``PREEMPTED``, with which all leave together.
    """
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            if not sys.flags.safe_path:
                sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except BaseException as error:
        from zerojax.distributed.failure import ends_at_once  # not loaded before the script
        from zerojax.launch.group import PREEMPTED

        is_joint_exit = isinstance(error, SystemExit) and error.code in (None, 0, PREEMPTED)
        if is_joint_exit or (isinstance(error, SystemExit) and not ends_at_once()):
            raise
        trace = error.__traceback__
        while trace and trace.tb_next and trace.tb_frame.f_code.co_filename in _OWN_FILES:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    run(sys.argv[1:])
