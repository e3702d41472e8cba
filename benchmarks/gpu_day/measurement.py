"""A measurement of the day: what runs in a process of its own, and what of it is kept."""

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping

PARTS = (
    "smoke",
    "forecasts",
    "training",
    "kernels",
    "offload",
    "XLA options",
)
"""By number, from 1."""

ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One process of the day.

    Attributes:
      name: In the results; unique.
      part: Number in ``PARTS``, from 1.
      tier: 1 for what matters most; all parts' first tier comes before any second.
      function: ``module:function`` below ``benchmarks.gpu_day``, which returns figures or yields
        them by and by, as dicts for JSON.
      seconds: Expected on an H100, start of the process and compiles included; the measurement
        begins only where so many are left.
      arguments: Of the function, as JSON has them.
    """

    name: str
    part: int
    tier: int
    function: str
    seconds: float
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)


def by_value(measurements: list[Measurement]) -> list[Measurement]:
    """First tiers first, in each tier by part."""
    return sorted(measurements, key=lambda each: (each.tier, each.part))


def attempts(tries: Mapping[str, Callable[[], object]]) -> Iterator[dict[str, object]]:
    """The figures of each try by its name; an error is a figure, and the next try goes on."""
    for name, run in tries.items():
        try:
            yield {name: run()}
        except Exception as error:
            yield {name: failure(error)}


def failure(error: BaseException) -> dict[str, str]:
    """An error as a figure: its type, its text, and its traceback."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return {ERROR: said[:500], "traceback": "".join(traceback.format_exception(error))[-8000:]}


def errors(figures: object, at: str = "") -> Iterator[tuple[str, str]]:
    """Path and text of every error within figures."""
    if isinstance(figures, Mapping):
        if isinstance(figures.get(ERROR), str):
            yield at, figures[ERROR]
        for name, inner in figures.items():
            yield from errors(inner, f"{at}/{name}" if at else str(name))
