"""The table of ``comms_logger``: the collectives of a step."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from zerojax.config.profiling import CommsLoggerConfig
from zerojax.devices.rates import Rates
from zerojax.hlo.links import sent_by
from zerojax.hlo.traffic import Collective
from zerojax.plan.table import columns, size


def table(
    sent: Sequence[tuple[Collective, int]],
    config: CommsLoggerConfig,
    rates: Rates | None,
    nodes: tuple[int, ...],
) -> str:
    """Formats the collectives of a step: a sum, and a line for each kind, size and group.

    Args:
      sent: All collectives of the step, in order, with the runs of their program in a step.
      config: The selection and the form of the lines.
      rates: The speeds of the devices; None omits the times.
      nodes: The node of each device, from :func:`zerojax.devices.network.nodes_of`.
    """
    if config.kinds == ():
        return "comms_logger: prof_all is false and prof_ops names no collective: nothing to list"
    groups: dict[tuple[object, ...], list[tuple[Collective, int]]] = collections.defaultdict(list)
    for index, (collective, runs) in enumerate(sent):
        if collective.group_size < 2 or (
            config.kinds is not None and collective.kind not in config.kinds
        ):
            continue
        shared_key = collective.kind, collective.dtypes, collective.payload_bytes, collective.groups
        extra_key = index if config.verbose else 0, collective.op_name if config.debug else ""
        groups[*shared_key, *extra_key].append((collective, runs))
    if not groups:
        suffix = "" if config.kinds is None else f" of {', '.join(config.kinds)}"
        return f"comms_logger: the step has no collectives{suffix}"
    header = ["collective", "dtype", "groups", "bytes", "times a step", "sent a step"]
    header += ["ms a step"] * (rates is not None) + ["from"] * config.debug
    rows, total_seconds, total_bytes = [tuple(header)], 0.0, 0
    for members in groups.values():
        collective, _ = members[0]
        times = sum(runs * each.times for each, runs in members)
        moved_bytes = sum(runs * each.moved_bytes for each, runs in members)
        seconds = times * rates.collective_seconds(sent_by(collective, nodes)) if rates else 0.0
        total_seconds, total_bytes = total_seconds + seconds, total_bytes + moved_bytes
        rows.append(
            (
                collective.kind,
                "+".join(collective.dtypes),
                f"{len(collective.groups)} x {collective.group_size}",
                size(collective.payload_bytes),
                f"{times}" if all(each.exact for each, _ in members) else f"{times} or more",
                size(moved_bytes),
                *([f"{1e3 * seconds:.3g}"] if rates else []),
                *([collective.op_name] if config.debug else []),
            )
        )
    time_text = (
        f"{1e3 * total_seconds:.3g} ms under way, forecast for {rates.kind}"
        if rates
        else "no times: the forecast knows no such devices"
    )
    summary = f"comms_logger: each device sends {size(total_bytes)} a step; {time_text}"
    return "\n".join([summary, *columns(rows, right=range(3, 6 + (rates is not None)))])
