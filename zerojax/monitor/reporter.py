"""One training run's logs, as its config asks for them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Self

import jax

from zerojax.config import ZeroConfig
from zerojax.monitor import lines
from zerojax.monitor.backlog import Backlog, Figures
from zerojax.monitor.clock import Clock, Pace
from zerojax.monitor.tags import PREFIX, figures
from zerojax.monitor.writers import check, open_writers


class Reporter:
    """Prints and writes what the config asks for; :meth:`record` is called after every step.

    Only the first process says anything. Files are opened by :meth:`open`, or at the first step: a
    process does not know its place before jax has its devices. Everything is written by
    :meth:`close`, at the end of a ``with`` block, or when the program ends.

    Metrics lie over the global samples seen, counted from the state's own steps where it comes
    from a checkpoint. DeepSpeed notes a loss at the samples before its step and the rate of the
    step to come; here all figures of a step, the rate that it used among them, stand at the
    samples after it.

    With ``wall_clock_breakdown``, ``Train/Samples/elapsed_time_ms_step`` is the whole step, forward
    and backward pass included, as it is one program (DeepSpeed's is the optimizer alone), and
    ``elapsed_time_ms_batch`` the batch's way to the devices. The first one includes compilation.

    Args:
      config: ``steps_per_print``, ``wall_clock_breakdown``, ``csv_monitor``, ``tensorboard``,
        ``wandb``; also ``fp16``, for the loss scale.

    Raises:
      ImportError: a package is missing that a monitor needs.
    """

    def __init__(self, config: ZeroConfig) -> None:
        check(config)
        self.config = config
        self._momentum = lines.momentum(config)
        self._backlog = Backlog(partial(open_writers, config))
        self._clock, self._pace = Clock(), Pace()
        self._count = 0
        # For a reporter that is dropped; the backlog itself sees to the interpreter's exit.
        weakref.finalize(self, self._backlog.close).atexit = False

    @property
    def active(self) -> bool:
        """Whether the config asks for anything."""
        c = self.config
        monitors = (c.csv_monitor, c.tensorboard, c.wandb)
        return bool(c.steps_per_print or c.wall_clock_breakdown) or any(monitors)

    def open(self) -> None:
        """Opens the files and runs now, so that what is wrong with them is known before the first
        step is compiled.

        Raises:
          OSError: a folder cannot be made. Whatever wandb raises comes through too.
        """
        if self._speaks():
            self._backlog.open()

    def record(
        self,
        report: Mapping[str, jax.Array],
        out: Any,
        rows: int,
        times: Mapping[str, float] | None = None,
    ) -> None:
        """Takes what a step did. Waits for the device only where a line is due.

        Args:
          report: of :func:`zerojax.telemetry`; the arrays must stay alive.
          out: what the step returned besides the state; its scalars become metrics.
          rows: of the global batch.
          times: seconds by phase ("batch", "step"), for ``wall_clock_breakdown``.

        Raises:
          OSError: at the first step, as :meth:`open`. Later errors of that kind are logged.
        """
        if not self._speaks():
            return
        config = self.config
        found = figures(report, out, fp16=config.fp16)
        for phase, seconds in (times or {}).items():
            found[f"{PREFIX}elapsed_time_ms_{phase}"] = 1e3 * seconds
        step = Figures(rows, report["step"], found)
        self._backlog.push(step)
        self._count += 1
        self._measure(step, times)
        # Not known before the first step is done: until then as if the run began with it.
        made = (self._backlog.before or 0) + self._count
        if config.steps_per_print and made % config.steps_per_print == 0:
            lines.say(self._progress(report, found))
            self._say_times()
        elif not config.steps_per_print:
            self._say_times()

    def close(self) -> None:
        """Writes everything. A later step opens the files again."""
        self._backlog.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _speaks(self) -> bool:
        return self.active and jax.process_index() == 0

    def _measure(self, step: Figures, times: Mapping[str, float] | None) -> None:
        if self._count > 1:
            self._pace.add(step.rows)
            if times:
                self._clock.add(times)
            return
        # The first step compiles; what is left of it now is the time of its execution.
        self._pace.start(time.perf_counter())
        if not step.ready():
            self._pace.add(step.rows)
        if times:
            lines.say(self._clock.first(times))

    def _progress(self, report: Mapping[str, Any], found: Mapping[str, Any]) -> str:
        text = lines.progress(report, found, self._momentum, fp16=self.config.fp16)
        pace = self._pace.per_second(time.perf_counter())
        self._backlog.drain(wait=True)  # all steps are done
        return text if pace is None else f"{text}, samples/sec={pace:.6g}"

    def _say_times(self) -> None:
        if (line := self._clock.line()) is not None:
            lines.say(line)
