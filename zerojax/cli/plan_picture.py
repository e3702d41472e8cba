"""The picture of `zerojax plan`: memory by kind, with one bar per stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zerojax.config import ConfigError
from zerojax.foresight.attribution import KINDS
from zerojax.foresight.choice import OFFLOADS, Choice
from zerojax.foresight.forecast import Forecast
from zerojax.plan.table import size

_FULL = "#b3261e"
_COLOURS = (
    "#3b6fb6", "#d9622b", "#7a5ba6", "#b9a5d6", "#8fb3e0", "#3f9b6d", "#e0a030", "#7d8794",
    "#aab2bd", "#d8dce2",
)  # fmt: skip


def forecasts(
    given: Choice, forecast: Callable[[Choice], Forecast]
) -> tuple[dict[str, Forecast], list[str]]:
    """Returns the forecasts of the same batch by the name of the stage, and a sentence on each
    stage that the config cannot have, such as stage 0 with quantized gradients.

    Args:
      given: The settings that the config chooses.
      forecast: Returns the forecast of a choice.
    """
    found, refused = {}, []
    for name, choice in by_stage(given):
        try:
            found[name] = forecast(choice)
        except ConfigError as error:
            refused.append(f"not drawn: {name}, which the config does not allow: {error}")
    return found, refused


def by_stage(given: Choice) -> Iterator[tuple[str, Choice]]:
    """Yields the same batch at each stage, with as much of the offload as the stage allows.

    Example:
      >>> given = Choice(stage=3, micro=1, offload="optimizer and parameters")
      >>> [name for name, _ in by_stage(given)][:2]
      ['stage 0', 'stage 1, optimizer offloaded']
    """
    for stage in range(4):
        offloads = OFFLOADS[: OFFLOADS.index(given.offload) + 1]
        choices = [dataclasses.replace(given, stage=stage, offload=each) for each in offloads]
        choice = next(each for each in reversed(choices) if each.possible)
        offload = "" if choice.offload == "none" else f", {choice.offload} offloaded"
        yield f"stage {stage}{offload}", choice


def draw(path: Path, title: str, stages: Mapping[str, Forecast]) -> None:
    """Writes the picture.

    Args:
      path: A path that ends in ".png" or ".svg".
      title: The title above the bars.
      stages: Forecasts by the name of their bar, from the top; their devices may differ.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.7 * len(stages) + 2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    most = max(max(x.rates.memory, x.peak.bytes) / 1e9 for x in stages.values())
    starts = [0.0] * len(stages)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        widths = [forecast.peak.memory.get(kind, 0) / 1e9 for forecast in stages.values()]
        if any(widths):
            label = kind if max(widths) > most / 500 else None  # narrower ones are invisible
            axes.barh(list(stages), widths, left=starts, height=0.6, color=colour, label=label)
            starts = [at + width for at, width in zip(starts, widths, strict=True)]
    for row, forecast in enumerate(stages.values()):
        at, colour = forecast.peak.bytes / 1e9 + most / 100, "black" if forecast.fits else _FULL
        axes.text(at, row, size(forecast.peak.bytes), va="center", color=colour)
        memory, label = forecast.rates.memory / 1e9, "device memory" * (row == 0)
        axes.vlines(memory, row - 0.5, row + 0.5, color=_FULL, linestyle="--", label=label)
    axes.invert_yaxis()
    axes.set_xlim(0, most * 1.12)
    axes.set_xlabel("GB of each device at the peak of a step, as compiled")
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower left", ncols=5, frameon=False)
    figure.savefig(path)
