"""What a training run shows while it runs: a live bar on a terminal, plain lines elsewhere.

Example::

    with Progress(console, 300, done=0, step_tokens=4096, mesh=mesh) as progress:
        progress.advance(step, loss, state)       # step 1, 2, ...; loss may still be computing
        progress.held_out(step, 2.31)             # after each evaluation
    progress.tokens_per_second, progress.peak     # compilation and evaluation not counted
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh
from rich.console import Console, RenderableType
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

import zerojax
from examples.run_clm.devices import device_bytes

PLAIN_LINES = 20
BAR = 10  # columns that the bar has at least
TIMED = 5  # steps before their rate is shown: the first ones still fill caches


class Progress:
    """Times steps, follows memory, and prints; `done` steps lie behind already."""

    def __init__(
        self, console: Console, steps: int, *, done: int, step_tokens: int, mesh: Mesh
    ) -> None:
        self.console, self.steps, self.mesh, self.step_tokens = console, steps, mesh, step_tokens
        self.peak = device_bytes(mesh)
        self._timed_steps, self._seconds = 0, 0.0
        self._mark: float | None = None
        self._pending: jax.Array | None = None
        self._told: list[str] = []
        self._bar = Bar(
            TextColumn("[bold]step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("loss [bold]{task.fields[loss]}[/]{task.fields[rates]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, loss="-", rates="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __rich__(self) -> RenderableType:
        """The status line."""
        return self._bar.get_renderable()

    def advance(self, step: int, loss: jax.Array, state: Any) -> None:
        """Step `step` (from 1) is under way. Waits for the one before, so one is in flight;
        now and then for this one, to read its learning rate and loss scale from the state."""
        due = step % max(1, self.steps // PLAIN_LINES) == 0
        if due:
            self._told = figures(zerojax.telemetry(state))
        shown = float(loss if due or self._pending is None else self._pending)
        self._pending = loss
        now = time.perf_counter()
        if self._mark is not None:
            self._seconds += now - self._mark
            self._timed_steps += 1
        self._mark = now
        self.peak = max(self.peak, device_bytes(self.mesh))
        loss_text, said = f"{shown:.3f}", self._figures()
        others = f"step {self.steps}/{self.steps} loss {loss_text} 0:00:00 "
        rates = fitting(said, self.console.width - len(others) - BAR)
        self._bar.update(self._task, completed=step, loss=loss_text, rates=rates)
        if due and not self.console.is_terminal:
            self.console.print(self._line(step, "  ".join([f"loss {loss_text}", *said])))

    def held_out(self, step: int, loss: float) -> None:
        """Held-out loss after `step` steps. The time since the last step is not counted."""
        self.console.print(self._line(step, f"held-out loss [bold]{loss:.3f}[/]"))
        self._pending = None
        if self._mark is not None:
            self._mark = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        """Over all timed steps; 0 before there are two."""
        return self._timed_steps * self.step_tokens / self._seconds if self._seconds else 0.0

    def _figures(self) -> list[str]:
        """What a line says behind the loss, in the order in which a narrow terminal keeps it."""
        timed = self._timed_steps >= TIMED
        speed = [f"{self.tokens_per_second:,.0f} tokens/s"] if timed else []
        return [*speed, told(self.peak), *self._told]

    def _line(self, step: int, text: str) -> str:
        return f"step {step:>{len(str(self.steps))}}/{self.steps}  {text}"


def figures(telemetry: dict[str, jax.Array]) -> list[str]:
    """Rate and gradient norm; with fp16 the loss scale and the steps that were skipped."""
    values = {name: float(value) for name, value in telemetry.items()}
    found = [f"lr {values['learning_rate']:.3g}", f"grad norm {values['grad_norm']:.3g}"]
    if values["loss_scale"] != 1:
        found.append(f"loss scale {values['loss_scale']:g}")
    if values["skipped_steps"]:
        found.append(f"skipped {values['skipped_steps']:.0f}")
    return found


def fitting(figures: Sequence[str], columns: int) -> str:
    """The first of the figures, as many as have room in so many columns, each behind two spaces.

    Example: fitting(["199 tokens/s", "peak 4.0 MB/device"], 30) == "  199 tokens/s".
    """
    text = ""
    for each in figures:
        if len(text) + 2 + len(each) > columns:
            break
        text += f"  {each}"
    return text


def told(peak: int) -> str:
    """Example: told(7_340_032) == "peak 7.3 MB/device"."""
    return f"peak {peak / 1e6:,.1f} MB/device"
