"""Workers: one that measures, and one beside it whose imports are done when its turn comes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.journal import CUT
from benchmarks.gpu_day.measurement import ERROR, Measurement

CACHE = Path(tempfile.gettempdir()) / "gpu-day-programs"
"""JAX's cache of compiled programs: a second process of the same step compiles nothing."""
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Environment of a worker that shares the GPU's memory."""

Worker = tuple[subprocess.Popen[bytes], Path]
"""A process and the file of its output."""


class Workers:
    """Runs measurements, each in a worker of its own, one after another.

    Args:
      toy: Whether they run on the CPU.
    """

    def __init__(self, toy: bool) -> None:
        self._toy = toy
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-day-"))
        self._count = 0
        self._next: Worker | None = None

    def run(self, measurement: Measurement, seconds: float, more: bool) -> dict[str, Any]:
        """Runs a measurement and returns its figures, after ``seconds`` those that it has by then.

        ``more``: whether another one follows, whose worker starts meanwhile.
        """
        worker = self._next or self._start()
        self._next = self._start() if more else None
        return self._order(worker, measurement, seconds)

    def together(self, measurements: Sequence[Measurement], seconds: float) -> list[dict[str, Any]]:
        """Runs measurements that share the GPU, each in a worker of its own."""
        workers = [self._start(SHARED) for _ in measurements]
        with ThreadPoolExecutor(len(workers)) as pool:
            limits = itertools.repeat(seconds)
            return [*pool.map(self._order, workers, measurements, limits)]

    def _order(self, worker: Worker, measurement: Measurement, seconds: float) -> dict[str, Any]:
        """Has a worker perform a measurement, and returns its figures."""
        began = time.monotonic()
        process, log = worker
        out = log.with_suffix(".json")
        order = {
            "function": measurement.function,
            "arguments": dict(measurement.arguments),
            "out": str(out),
            "toy": self._toy,
        }
        assert process.stdin
        ended = True
        try:
            process.stdin.write(f"{json.dumps(order)}\n".encode())
            process.stdin.close()
            process.wait(max(1.0, seconds - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            ended = False
        except BrokenPipeError:
            process.wait()  # it died of its imports, and its log says of what
        finally:
            _end(process)
        figures = json.loads(out.read_text()) if out.exists() else {}
        if not ended:
            figures[CUT] = f"after {seconds:.0f} s"
        if process.returncode and ended and ERROR not in figures:
            last = log.read_text(errors="replace")[-4000:]
            figures[ERROR] = f"the process ended with status {process.returncode}"
            figures["traceback"] = last
        return figures | {"in_all": time.monotonic() - began}

    def close(self) -> None:
        if self._next:
            _end(self._next[0])
            self._next = None

    def _start(self, more: Mapping[str, str] = types.MappingProxyType({})) -> Worker:
        self._count += 1
        log = self._folder / f"{self._count}.log"
        environment = {**os.environ, **ENVIRONMENT, **more}
        if self._toy:
            environment |= {"JAX_PLATFORMS": "cpu"}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu_day.worker"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )
        return process, log


def _end(process: subprocess.Popen[bytes]) -> None:
    """The worker with all that it started, and only those."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()  # of one that had no order
