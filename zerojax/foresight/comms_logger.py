"""The table of ``comms_logger``: the collectives of a step."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from zerojax.config.profiling import CommsLoggerConfig
from zerojax.devices.rates import Rates
from zerojax.hlo.links import sent_by
from zerojax.hlo.traffic import Collective
from zerojax.plan.table import columns, size


class Sent(NamedTuple):
    """A collective of one program of a step.

    Attributes:
      collective: The collective.
      times: Runs of the program in a step.
    """

    collective: Collective
    times: int


def table(
    sent: Sequence[Sent],
    config: CommsLoggerConfig,
    rates: Rates | None,
    nodes: tuple[int, ...],
) -> str:
    """Formats the collectives of a step: a sum, and a line for each kind, size and group.

    Args:
      sent: All collectives of the step, in order.
      config: The selection and the form of the lines.
      rates: The speeds of the devices; None omits the times.
      nodes: The node of each device, from :func:`zerojax.devices.network.nodes_of`.
    """
    if config.kinds == ():
        return "comms_logger: prof_all is false and prof_ops names no collective: nothing to list"
    groups: dict[tuple[object, ...], list[Sent]] = collections.defaultdict(list)
    for at, each in enumerate(sent):
        one = each.collective
        if one.group_size < 2 or (config.kinds is not None and one.kind not in config.kinds):
            continue
        alike = one.kind, one.dtypes, one.payload_bytes, one.groups
        apart = at if config.verbose else 0, one.op_name if config.debug else ""
        groups[*alike, *apart].append(each)
    if not groups:
        of = "" if config.kinds is None else f" of {', '.join(config.kinds)}"
        return f"comms_logger: the step has no collectives{of}"
    heads = ["collective", "dtype", "groups", "bytes", "times a step", "sent a step"]
    heads += ["ms a step"] * (rates is not None) + ["from"] * config.debug
    rows, total, whole = [tuple(heads)], 0.0, 0
    for same in groups.values():
        one = same[0].collective
        times = sum(each.times * each.collective.times for each in same)
        moved = sum(each.times * each.collective.moved_bytes for each in same)
        seconds = times * rates.collective_seconds(sent_by(one, nodes)) if rates else 0.0
        total, whole = total + seconds, whole + moved
        rows.append(
            (
                one.kind,
                "+".join(one.dtypes),
                f"{len(one.groups)} x {one.group_size}",
                size(one.payload_bytes),
                f"{times}" if all(each.collective.exact for each in same) else f"{times} or more",
                size(moved),
                *([f"{1e3 * seconds:.3g}"] if rates else []),
                *([one.op_name] if config.debug else []),
            )
        )
    said = (
        f"{1e3 * total:.3g} ms under way, forecast for {rates.kind}"
        if rates
        else "no times: the forecast knows no such devices"
    )
    first = f"comms_logger: each device sends {size(whole)} a step; {said}"
    return "\n".join([first, *columns(rows, right=range(3, 6 + (rates is not None)))])
