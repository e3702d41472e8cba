"""Progress of training: time left, tokens/s and memory; the mean loss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self, cast

import jax
from jax.sharding import Mesh, NamedSharding

from zerojax.trainer.screen import Screen
from zerojax.xla.types import Shaped


class TrainingProgress:
    """Times steps, and prints progress.

    Args:
      screen: The screen of the run.
      steps: Updates of the run.
      done: Updates done before.
      mesh: The devices.
    """

    def __init__(self, screen: Screen, steps: int, done: int, mesh: Mesh) -> None:
        self._screen, self._steps, self._mesh = screen, steps, mesh
        self._mark: float | None = None
        self._seconds, self._tokens, self._rows = 0.0, 0, 0
        self._shown = screen.bar("step", steps, done, keep=True)

    def __enter__(self) -> Self:
        self._bar = self._shown.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shown.__exit__(kind, error, traceback)

    def advance(self, rows: int, batch: Mapping[str, Shaped]) -> None:
        """Counts an update that was dispatched; ``rows`` are those of all processes."""
        shape = batch["input_ids"].shape[1:] if "input_ids" in batch else None
        if self._mark is not None:
            self._seconds += time.perf_counter() - self._mark
            self._rows += rows
            self._tokens += 0 if shape is None else rows * math.prod(shape)
        self._mark = time.perf_counter()  # the first update compiles, and is not timed
        self._bar.advance()

    def restart(self) -> None:
        """Excludes the time since the last update, for example that of an evaluation."""
        self._mark = self._mark and time.perf_counter()

    def log(self, step: int, logs: Mapping[str, float]) -> None:
        """Prints the figures of a log; reading the loss has already waited for the device."""
        pace = "  ".join(filter(None, (self.speed(), self._memory())))
        self._bar.show(pace)
        self._screen.print(f"{counted(step, self._steps)}  {figures(logs)}  {pace}")

    def speed(self) -> str:
        """Returns the tokens or rows per second of the updates that were timed; empty if none."""
        number, unit = (self._tokens, "tokens/s") if self._tokens else (self._rows, "rows/s")
        return f"{number / self._seconds:,.0f} {unit}" if self._seconds else ""

    def _memory(self) -> str:
        return f"{_device_bytes(self._mesh) / 1e6:,.1f} MB/device"


def counted(step: int, steps: int) -> str:
    """Returns the start of a line, the number of updates done."""
    return f"step {step:>{len(str(steps))}}/{steps}"


def figures(logs: Mapping[str, object]) -> str:
    """Returns names and values for a line.

    Example:
      >>> figures({"eval_loss": 0.123456, "eval_rows": 12})
      'eval_loss 0.1235  eval_rows 12'
    """
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in logs.items()
    )


class MeanLoss:
    """Losses of a run's steps, transferred to the host when they are logged.

    Args:
      values: The losses since the last log of a run that is resumed.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._since: list[float | jax.Array] = [*values]
        self._sum, self._count = 0.0, 0

    def add(self, loss: jax.Array) -> None:
        """Adds a step's loss; waits for the step before, so that at most one step is in flight."""
        jax.block_until_ready(self._since[-1:])
        self._since.append(loss)

    def values(self) -> list[float]:
        """Returns the losses since the last log."""
        return [*map(float, self._since)]

    def take(self) -> float:
        """Returns the mean loss since the last log, and starts the next interval."""
        values = self.values()
        self._sum, self._count = self._sum + sum(values), self._count + len(values)
        self._since.clear()
        return sum(values) / len(values) if values else math.nan

    def of_run(self) -> float:
        """Returns the mean of all losses."""
        self.take()
        return self._sum / self._count if self._count else math.nan


def _device_bytes(mesh: Mesh) -> int:
    """Returns the largest peak over devices if they report it, else the bytes of live arrays."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    if all("peak_bytes_in_use" in device_stats for device_stats in stats):
        return cast(int, max(device_stats["peak_bytes_in_use"] for device_stats in stats))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if isinstance(x.sharding, NamedSharding) and x.sharding.memory_kind == "device"
    )
