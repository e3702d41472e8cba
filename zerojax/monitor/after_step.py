"""What the host looks at after a step: the logs, a loss scale with nowhere left to go, and numbers
that are not finite."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, TypeAlias, TypeVar

import jax

from zerojax.config import ZeroConfig
from zerojax.monitor import Reporter
from zerojax.monitor.finite import Finiteness, FiniteWatch
from zerojax.optim.telemetry import report
from zerojax.optim.wrap import ZeroOptState

_T = TypeVar("_T")
Signals: TypeAlias = dict[str, Any]


class LossScaleError(RuntimeError):
    """Gradients overflow at the smallest loss scale: training no longer moves."""


class AfterStep:
    """Looks at each step of one run, without waiting for the device.

    Args:
      config: says what is to be logged, and whether an overflow at the smallest scale raises.

    Raises:
      ImportError: what the logs need is not installed.
    """

    # How many steps later a flag is read: the device always has work ahead, and every process
    # raises at the same step.
    _BEHIND = 2

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config
        self._raises = config.fp16 and not config.loss_scale and config.raise_error_at_min_scale
        self._reporter = Reporter(config)
        # Where such steps are skipped, telemetry counts them.
        self._finite = None if config.skips_overflow else FiniteWatch()
        self._flags: deque[jax.Array] = deque()
        self._since, self._times = 0.0, dict[str, float]()

    def signals(self, opt_state: ZeroOptState, out: Any) -> Signals:
        """What of a step :meth:`note` needs: copies, for the state is donated.

        Args:
          opt_state: after the step.
          out: what the step returns beside the state.
        """
        signals: Signals = report(opt_state) if self._reporter.active else {}
        if self._finite is not None:
            signals["finite"] = Finiteness.of(opt_state.steps, opt_state.grad_norm, out)
        if self._raises and opt_state.loss_scale is not None:
            signals["exhausted"] = opt_state.loss_scale.exhausted
        return signals

    def check(self) -> None:
        """Before a step.

        Raises:
          OSError: the logs cannot be written where the config wants them.
          LossScaleError: the last step but one overflowed with the scale at its minimum.
        """
        self._reporter.open()
        if self._finite is not None:
            self._finite.look()
        while len(self._flags) >= self._BEHIND:
            if self._flags.popleft():
                self._flags.clear()
                raise LossScaleError(
                    "two calls ago a gradient overflowed with the loss scale at its minimum, "
                    f"{self._config.min_loss_scale:g}. That step was skipped, this call has not "
                    "run, and the state is intact. Look for NaN in the batch or the loss, lower "
                    "the learning rate or min_loss_scale, or train in bf16; "
                    "raise_error_at_min_scale = false skips such steps without an error."
                )
        self._since, self._times = time.perf_counter(), {}

    def phase(self, name: str, value: _T) -> _T:
        """A phase of the step has made ``value``. Where times are asked for, waits for it."""
        if self._config.wall_clock_breakdown:
            jax.block_until_ready(value)
            now = time.perf_counter()
            self._times[name], self._since = now - self._since, now
        return value

    def note(self, signals: Signals, out: Any, rows: int) -> None:
        """After a step.

        Args:
          signals: as :meth:`signals` gave them.
          out: what the step returned beside the state.
          rows: of its batch.
        """
        if self._finite is not None:
            self._finite.push(signals["finite"])
        if "exhausted" in signals:
            self._flags.append(signals["exhausted"])
        self._reporter.record(signals, out, rows, self._times or None)

    def close(self) -> None:
        """Writes what is left of the logs, and looks at the last steps."""
        if self._finite is not None:
            self._finite.look(wait=True)
        self._reporter.close()
