"""Times by phase and samples per second."""

from __future__ import annotations

from collections.abc import Mapping


class Clock:
    """Samples per second, and mean times of a step's phases as DeepSpeed prints them, between two
    lines. Samples per second include the loading of batches.

    Example:
      >>> clock = Clock()
      >>> clock.restart(now=100.0)
      >>> clock.add(8, {"batch": 0.001, "step": 0.02})
      >>> clock.add(8, {"batch": 0.001, "step": 0.03})
      >>> clock.pace(now=104.0)
      4.0
      >>> print(clock.line())
      time (ms) | batch: 1.00 | step: 25.00 | mean of 2 steps
    """

    def __init__(self) -> None:
        self.restart(0.0)

    def restart(self, now: float) -> None:
        """Begins with the steps after a line."""
        self._since, self._rows, self._steps = now, 0, 0
        self._sums: dict[str, float] = {}

    def add(self, rows: int, times: Mapping[str, float] | None = None) -> None:
        """Adds the rows of one step, and its seconds by phase."""
        self._rows += rows
        for phase, seconds in (times or {}).items():
            self._sums[phase] = self._sums.get(phase, 0.0) + seconds
        self._steps += bool(times)

    def pace(self, now: float) -> float | None:
        """Returns the samples per second, or None without rows."""
        elapsed = now - self._since
        return self._rows / elapsed if self._rows and elapsed > 0 else None

    def line(self) -> str | None:
        """Returns the line of the phases, or None without their times."""
        if not self._steps:
            return None
        text = shown({phase: total / self._steps for phase, total in self._sums.items()})
        return text + (f" | mean of {self._steps} steps" if self._steps > 1 else "")


def shown(times: Mapping[str, float]) -> str:
    """Formats seconds by phase.

    Example:
      >>> shown({"batch": 0.001, "step": 9.5})
      'time (ms) | batch: 1.00 | step: 9500.00'
    """
    return " | ".join(["time (ms)", *(f"{name}: {1e3 * s:.2f}" for name, s in times.items())])
