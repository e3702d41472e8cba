"""A warning of ragged products that XLA runs on all rows on every device."""

from __future__ import annotations

from collections.abc import Sequence

from zerojax.accumulation.lines import line
from zerojax.distributed import log
from zerojax.graph.search import equations
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, Jaxpr


def warn_of_ragged_products(name: str, jaxpr: Jaxpr, devices: int) -> None:
    """Warns of each ``jax.lax.ragged_dot`` of a step whose groups extend over the global batch.

    The beginning of a group depends on the rows of all devices, so XLA's partitioner gathers the
    rows, and each device multiplies all of them. Under ``zero.per_device`` the groups have the rows
    of one device only.

    Args:
      name: The step's name.
      jaxpr: The step's jaxpr, open.
      devices: The number of devices that share the batch.
    """
    places = {
        line(jaxprs.source(eqn).traceback): None
        for eqn in equations(jaxpr, _of_all_rows)
        if eqn.primitive.name == "ragged_dot_general" and not _batch_dimensions(eqn)
    }
    if devices == 1 or not places:
        return
    known = ", ".join(place for place in places if place) or "a line that is not known"
    log.warning(
        "%s: jax.lax.ragged_dot at %s runs on all rows on each of the %d devices, as under any "
        "jit: its groups come from the rows of all devices. Put the sort and the products into a "
        "function of one device's rows, zero.per_device(experts, replicated=[...]); "
        "docs/mixture-of-experts.md has one.",
        name,
        known,
        devices,
    )


def _of_all_rows(eqn: Equation) -> bool:
    """Returns whether an equation's regions see the rows of all devices: not in a ``shard_map``."""
    return eqn.primitive.name != "shard_map"


def _batch_dimensions(product: Equation) -> Sequence[int]:
    """Returns the batch dimensions of a product. With them, each batch entry is sorted separately,
    and its rows stay on their device."""
    numbers = jaxprs.param(product, "ragged_dot_dimension_numbers").dot_dimension_numbers
    return numbers[1][0]
