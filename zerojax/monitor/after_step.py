"""The host's work after a step: logs, and checks for non-finite numbers and an exhausted scale."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import jax

from zerojax.config import ZeroConfig
from zerojax.monitor import Reporter
from zerojax.monitor.finite import Finiteness, FiniteWatch
from zerojax.optim.telemetry import report
from zerojax.optim.wrap import ZeroOptState
from zerojax.xla.types import PyTree

_T = TypeVar("_T")
Signals: TypeAlias = dict[str, PyTree]


class LossScaleError(RuntimeError):
    """The error for gradients that overflow at the smallest loss scale, so that training stalls."""


class AfterStep:
    """The logs and checks of each step of one run, which do not wait for the device.

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
        self._config = config
        self._raises = config.fp16 and not config.loss_scale and config.raise_error_at_min_scale
        self._reporter = Reporter(config)
        self.logs = self._reporter.active
        # Telemetry counts skipped steps; the warning is for non-finite steps that are not skipped.
        self._finite = None if config.skips_overflow else FiniteWatch()
        self._flags: deque[jax.Array] = deque()
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
        if self.logs:
            self._reporter.open()
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
        """Records a step's numbers, if there are ``logs``.

        Args:
          signals: The result of :meth:`signals`.
          out: The step's results besides the state.
          rows: The rows of the global batch.
        """
        self._reporter.record(signals, out, rows, self._times or None)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes further figures to the config's monitors; see :meth:`Reporter.write`."""
        self._reporter.write(figures, samples)

    def flush(self) -> None:
        """Checks the last steps for non-finite numbers, and writes the rest of the logs."""
        if self._finite is not None:
            self._finite.drain(wait=True)
        self._reporter.flush()

    def close(self) -> None:
        """Flushes, and closes the logs."""
        try:
            self.flush()
        finally:
            self._reporter.close()
