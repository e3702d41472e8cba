"""The logs of one training run."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Self

import jax

from zerojax.config import ZeroConfig
from zerojax.monitor import lines
from zerojax.monitor.backlog import Backlog, Figures
from zerojax.monitor.clock import Clock, shown
from zerojax.monitor.tags import PREFIX, figures
from zerojax.monitor.writers import check, open_writers
from zerojax.xla.types import PyTree


class Reporter:
    """A writer of the logs that the config asks for; call :meth:`record` after every step.

    Only the first process logs. :meth:`open` or the first step opens the files, since a process
    does not know its index before jax has its devices. :meth:`close`, the end of a ``with`` block,
    or the end of the program writes the remaining logs.

    The x-axis of metrics is the number of global samples seen, which a state from a checkpoint
    continues. All figures of a step, including its learning rate, are written at the number of
    samples after the step; DeepSpeed writes a loss at the number before its step, and the learning
    rate of the next step.

    With ``wall_clock_breakdown``, ``Train/Samples/elapsed_time_ms_step`` is the time of the entire
    step, including forward and backward pass, since the step is one program (DeepSpeed's is only
    the optimizer's time), and ``elapsed_time_ms_batch`` is the time of the batch's transfer to the
    devices. The first step includes compilation.

    Args:
      config: The fields ``steps_per_print``, ``wall_clock_breakdown``, ``csv_monitor``,
        ``tensorboard`` and ``wandb``; also ``fp16``, for the loss scale.

    Raises:
      ImportError: The package of a monitor is not installed.
    """

    def __init__(self, config: ZeroConfig) -> None:
        check(config)
        self.config = config
        self._momentum = lines.momentum(config)
        self._backlog = Backlog(partial(open_writers, config))
        self._clock = Clock()
        self._count = 0
        # Closes the files of a dropped reporter; at exit the backlog closes itself.
        weakref.finalize(self, self._backlog.close).atexit = False

    @property
    def active(self) -> bool:
        """True if the config asks for any log."""
        c = self.config
        monitors = (c.csv_monitor, c.tensorboard, c.wandb)
        return bool(c.steps_per_print or c.wall_clock_breakdown) or any(monitors)

    def open(self) -> None:
        """Opens the files and runs now, so that errors come before the first step compiles.

        Raises:
          OSError: A folder cannot be created. Errors of wandb are raised unchanged.
        """
        if self._logs():
            self._backlog.open()

    def record(
        self,
        report: Mapping[str, jax.Array],
        out: PyTree,
        rows: int,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Records a step's results. Waits for the device only if a line is due.

        Args:
          report: The result of :func:`zerojax.telemetry`; its arrays must stay alive.
          out: The step's results besides the state; their scalars become metrics.
          rows: The rows of the global batch.
          times: Seconds by phase ("batch", "step"), for ``wall_clock_breakdown``.

        Raises:
          OSError: At the first step, as for :meth:`open`; later errors are logged.
        """
        if not self._logs():
            return
        config = self.config
        by_tag = figures(report, out, fp16=config.fp16)
        for phase, seconds in (times or {}).items():
            by_tag[f"{PREFIX}elapsed_time_ms_{phase}"] = 1e3 * seconds
        step = Figures(rows, report["step"], by_tag)
        self._backlog.push(step)
        self._count += 1
        self._measure(step, times)
        # Until the first step is done, the number of earlier steps is unknown and counts as 0.
        step_number = (self._backlog.before or 0) + self._count
        is_due = not config.steps_per_print or step_number % config.steps_per_print == 0
        if not is_due:
            return
        text = ""
        if config.steps_per_print:  # waits for the step
            text = lines.progress(report, by_tag, self._momentum, fp16=config.fp16)
        now = time.perf_counter()
        pace, times_line = self._clock.pace(now), self._clock.line()
        self._clock.restart(now)
        if text:
            self._backlog.drain()  # all steps are done
            lines.say(text if pace is None else f"{text}, samples/sec={pace:.6g}")
        if times_line is not None:
            lines.say(times_line)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes further figures by tag at a number of samples, after those of earlier steps.

        Raises:
          OSError: At the first write, as for :meth:`open`; later errors are logged.
        """
        if self._logs():
            self._backlog.write(figures, samples)

    def flush(self) -> None:
        """Writes everything; files and runs stay open."""
        self._backlog.flush()

    def close(self) -> None:
        """Writes everything. A later step opens the files again."""
        self._backlog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _logs(self) -> bool:
        return self.active and jax.process_index() == 0

    def _measure(self, step: Figures, times: Mapping[str, float] | None) -> None:
        if self._count > 1:
            self._clock.add(step.rows, times)
            return
        # The first step has compiled by now; its execution may still go on.
        self._clock.restart(time.perf_counter())
        if not step.ready():
            self._clock.add(step.rows)
        if times:
            lines.say(f"{shown(times)} | first step, compilation included")
