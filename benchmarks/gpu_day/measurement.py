"""A measurement of ``gpu_day``, which a process of its own runs; an error is one of its figures."""

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping

PARTS = (
    "smoke",
    "forecasts",
    "training",
    "kernels",
    "offload",
)
"""By number, from 1."""

ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A measurement, which runs in a process of its own.

    Attributes:
      name: Its key in the results; unique.
      part: The number of its part in ``PARTS``, from 1.
      tier: 1 for what matters most; the first tier of all parts comes before any second.
      function: ``module:function`` below ``benchmarks.gpu_day``, which returns figures, or yields
        them one after the other, as dicts for JSON.
      seconds: The seconds that it should take on an H100, with the start of the process and the
        compiles; it begins only if so many are left.
      arguments: The function's keyword arguments, as values of JSON.
      together: Whether it shares the GPU with others, as it measures no time.
    """

    name: str
    part: int
    tier: int
    function: str
    seconds: float
    arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    together: bool = False


def by_value(measurements: list[Measurement]) -> list[Measurement]:
    """Measurements in the order of their tiers, and within a tier of their parts."""
    return sorted(measurements, key=lambda each: (each.tier, each.part))


def attempts(tries: Mapping[str, Callable[[], object]]) -> Iterator[dict[str, object]]:
    """Calls each function and yields its figures by its name.

    An error takes the place of the figures, and the next function is called."""
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
    """Path and text of every error in the figures of a measurement."""
    if isinstance(figures, Mapping):
        if isinstance(figures.get(ERROR), str):
            yield at, figures[ERROR]
        for name, inner in figures.items():
            yield from errors(inner, f"{at}/{name}" if at else str(name))
