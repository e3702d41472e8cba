"""The table of ``memory_breakdown``: the memory of a step on each device, by use."""

from __future__ import annotations

from zerojax.foresight.attribution import GRADIENTS, OTHER
from zerojax.foresight.forecast import Forecast
from zerojax.plan.table import columns, size


def table(forecast: Forecast) -> str:
    """Formats the memory of the step's program that needs the most.

    Args:
      forecast: The forecast of the step's programs, measured by
        :func:`zerojax.foresight.costs.measure_memory`: arguments by name, and temporaries as one
        sum.
    """
    peak = forecast.peak
    gradients = sum(leaf.bytes_per_device for leaf in forecast.plan.gradients())
    temporary = "activations, gathered parameters"
    if GRADIENTS not in peak.memory:
        temporary += f", gradients ({size(gradients)} where all exist at once)"
    suffix = f" in {peak.name!r}" if len(forecast.programs) > 1 else ""
    rows = [
        ("temporaries" if kind == OTHER else kind, size(n), temporary if kind == OTHER else "")
        for kind, n in peak.memory.items()
    ]
    rows.append(("peak", size(peak.bytes), "what each device needs"))
    if forecast.host_bytes:
        rows.append(("host memory", size(forecast.host_bytes), "for each device"))
    if forecast.disk_bytes:
        rows.append(("disk", size(forecast.disk_bytes), "for each device"))
    return "\n".join(
        [f"memory_breakdown: bytes of each device{suffix}", *columns(rows, right=(1,))]
    )
