"""Times by phase and samples per second."""

from __future__ import annotations

from collections.abc import Mapping


class Clock:
    """Mean times of a step's phases between two lines, as DeepSpeed prints them.

    Example:
      >>> clock = Clock()
      >>> print(clock.first({"batch": 0.001, "step": 9.5}))
      time (ms) | batch: 1.00 | step: 9500.00 | first step, compilation included
      >>> clock.add({"batch": 0.001, "step": 0.02})
      >>> clock.add({"batch": 0.001, "step": 0.03})
      >>> print(clock.line())
      time (ms) | batch: 1.00 | step: 25.00 | mean of 2 steps
    """

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._steps = 0

    def first(self, times: Mapping[str, float]) -> str:
        """Returns the line of the first step, which no mean includes."""
        return f"{_shown(times)} | first step, compilation included"

    def add(self, times: Mapping[str, float]) -> None:
        """Adds the seconds of one step, by phase."""
        self._steps += 1
        for phase, seconds in times.items():
            self._sums[phase] = self._sums.get(phase, 0.0) + seconds

    def line(self) -> str | None:
        """Returns the line of the steps since the last line, or None without steps."""
        if not self._steps:
            return None
        text = _shown({phase: total / self._steps for phase, total in self._sums.items()})
        if self._steps > 1:
            text += f" | mean of {self._steps} steps"
        self._sums, self._steps = {}, 0
        return text


class Pace:
    """Samples per second between two lines, including the loading of batches.

    Example:
      >>> pace = Pace()
      >>> pace.start(now=100.0)
      >>> pace.add(8)
      >>> pace.add(8)
      >>> pace.per_second(now=104.0)
      4.0
    """

    def __init__(self) -> None:
        self._rows, self._since = 0, 0.0

    def start(self, now: float) -> None:
        self._rows, self._since = 0, now

    def add(self, rows: int) -> None:
        self._rows += rows

    def per_second(self, now: float) -> float | None:
        """Returns the pace since the last call, or None without rows, and restarts at ``now``."""
        rows, elapsed = self._rows, now - self._since
        self.start(now)
        return rows / elapsed if rows and elapsed > 0 else None


def _shown(times: Mapping[str, float]) -> str:
    return " | ".join(["time (ms)", *(f"{name}: {1e3 * s:.2f}" for name, s in times.items())])
