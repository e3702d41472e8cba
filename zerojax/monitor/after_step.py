"""The host's work after a step: logs, and checks for non-finite numbers and an exhausted scale."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import TypeAlias, TypeVar

import jax

from zerojax.config import ZeroConfig
from zerojax.monitor import lines
from zerojax.monitor.backlog import Backlog, Figures
from zerojax.monitor.clock import Clock, shown
from zerojax.monitor.finite import Finiteness, FiniteWatch
from zerojax.monitor.tags import PREFIX, figures
from zerojax.monitor.writers import check, open_writers
from zerojax.optim.telemetry import report
from zerojax.optim.wrap import ZeroOptState
from zerojax.xla.types import PyTree

_T = TypeVar("_T")
Signals: TypeAlias = dict[str, PyTree]


class LossScaleError(RuntimeError):
    """The error for gradients that overflow at the smallest loss scale, so that training stalls."""


class AfterStep:
    """The logs and checks of each step of one run, which do not wait for the device.

    Only the first process logs. The first step opens the files, since a process does not know its
    index before jax has its devices. :meth:`close`, the end of the object or the end of the program
    writes the remaining logs.

    The x-axis of metrics is the number of global samples seen, which a state from a checkpoint
    continues. All figures of a step, including its learning rate, are written at the number of
    samples after the step; DeepSpeed writes a loss at the number before its step, and the learning
    rate of the next step.

    With ``wall_clock_breakdown``, ``Train/Samples/elapsed_time_ms_step`` is the time of the entire
    step, including forward and backward pass, since the step is one program (DeepSpeed's is only
    the optimizer's time), and ``elapsed_time_ms_batch`` is the time of the batch's transfer to the
    devices. The first step includes compilation.

    Args:
      config: The config, which selects the logs and whether an overflow at the smallest scale
        raises.

    Attributes:
      logs: Whether the config asks for any log.

    Raises:
      ImportError: The package of a monitor is not installed.
    """

    # Steps between an overflow and the read of its flag: the device always has work queued, and
    # every process raises at the same step.
    _BEHIND = 2

    def __init__(self, config: ZeroConfig) -> None:
        check(config)
        self._config, self._momentum = config, lines.momentum(config)
        self._raises = config.fp16 and not config.loss_scale and config.raise_error_at_min_scale
        monitors = (config.csv_monitor, config.tensorboard, config.wandb)
        self.logs = bool(config.steps_per_print or config.wall_clock_breakdown) or any(monitors)
        self._backlog = Backlog(partial(open_writers, config))
        # Closes the files of a dropped step; at exit the backlog closes itself.
        weakref.finalize(self, self._backlog.close).atexit = False
        # Telemetry counts skipped steps; the warning is for non-finite steps that are not skipped.
        self._finite = None if config.skips_overflow else FiniteWatch()
        self._flags: deque[jax.Array] = deque()
        self._clock, self._count = Clock(), 0
        self._since, self._times = 0.0, dict[str, float]()

    def signals(self, opt_state: ZeroOptState, out: PyTree) -> Signals:
        """Returns the numbers of a step that :meth:`note` needs, traced within the step.

        The numbers are copies, since the state is donated to the next step.

        Args:
          opt_state: The optimizer's state after the step.
          out: The step's results besides the state.
        """
        signals: Signals = report(opt_state) if self.logs else {}
        if self._finite is not None:
            signals["finite"] = Finiteness.of(opt_state.steps, opt_state.grad_norm, out)
        if self._raises and opt_state.loss_scale is not None:
            signals["exhausted"] = opt_state.loss_scale.exhausted
        return signals

    def check(self) -> None:
        """Opens the logs and checks earlier steps, before a step.

        Raises:
          OSError: The logs cannot be written to the config's folders.
          LossScaleError: The step before the last overflowed with the scale at its minimum.
        """
        if self._writes():
            self._backlog.open()
        while len(self._flags) >= self._BEHIND:
            if self._flags.popleft():
                self._flags.clear()
                raise LossScaleError(
                    "a gradient overflowed at the minimum loss scale, "
                    f"{self._config.min_loss_scale:g}, two calls ago. That step was skipped, "
                    "this call has not run, and the state is intact. Look for NaN in the "
                    "batch or the loss, lower the learning rate or min_loss_scale, or train "
                    "in bf16; raise_error_at_min_scale = false only skips such steps."
                )
        if self._config.wall_clock_breakdown:
            self._since, self._times = time.perf_counter(), {}

    def phase(self, name: str, value: _T) -> _T:
        """Ends a phase and returns its result; waits for it under ``wall_clock_breakdown``."""
        if self._config.wall_clock_breakdown:
            jax.block_until_ready(value)
            now = time.perf_counter()
            self._times[name], self._since = now - self._since, now
        return value

    def note(self, signals: Signals) -> None:
        """Checks a step's numbers, the result of :meth:`signals`, after the step."""
        if self._finite is not None:
            self._finite.push(signals["finite"])
        if "exhausted" in signals:
            self._flags.append(signals["exhausted"])

    def record(self, signals: Signals, out: PyTree, rows: int) -> None:
        """Records a step's numbers, if there are ``logs``. Waits for the device only if a line is
        due.

        Args:
          signals: The result of :meth:`signals`; its arrays must stay alive.
          out: The step's results besides the state; their scalars become metrics.
          rows: The rows of the global batch.
        """
        if not self._writes():
            return
        config, times = self._config, self._times
        by_tag = figures(signals, out, fp16=config.fp16)
        for phase, seconds in times.items():
            by_tag[f"{PREFIX}elapsed_time_ms_{phase}"] = 1e3 * seconds
        step = Figures(rows, signals["step"], by_tag)
        self._backlog.push(step)
        self._count += 1
        self._measure(step, times)
        # Until the first step is done, the number of earlier steps is unknown and counts as 0.
        step_number = (self._backlog.before or 0) + self._count
        if config.steps_per_print and step_number % config.steps_per_print:
            return
        text = ""
        if config.steps_per_print:  # waits for the step
            text = lines.progress(signals, by_tag, self._momentum, fp16=config.fp16)
        now = time.perf_counter()
        pace, times_line = self._clock.pace(now), self._clock.line()
        self._clock.restart(now)
        if text:
            self._backlog.drain()  # all steps are done
            lines.say(text if pace is None else f"{text}, samples/sec={pace:.6g}")
        if times_line is not None:
            lines.say(times_line)

    def _measure(self, step: Figures, times: Mapping[str, float]) -> None:
        if self._count > 1:
            self._clock.add(step.rows, times)
            return
        # The first step has compiled by now; its execution may still go on.
        self._clock.restart(time.perf_counter())
        if not step.ready():
            self._clock.add(step.rows)
        if times:
            lines.say(f"{shown(times)} | first step, compilation included")

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes further figures by tag to the config's monitors at a number of samples, after
        those of earlier steps.

        Raises:
          OSError: At the first write, if the logs cannot be written; later errors are logged.
        """
        if self._writes():
            self._backlog.write(figures, samples)

    def _writes(self) -> bool:
        return self.logs and jax.process_index() == 0

    def flush(self) -> None:
        """Checks the last steps for non-finite numbers, and writes the rest of the logs; files and
        runs stay open."""
        if self._finite is not None:
            self._finite.drain(wait=True)
        self._backlog.flush()

    def close(self) -> None:
        """Flushes, and closes the logs, which a later step opens again."""
        try:
            self.flush()
        finally:
            self._backlog.close()
