"""The plan as a readable table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from zerojax.plan.leaf import Leaf

MUCH = 2**26
"""Bytes of replicated extra state up to which zerojax gives no warning."""

GROUPS = {
    "params": "parameters",
    "grads": "gradients",
    "compute": "compute copies",
    "secondary": "secondary shards",
    "live": "stay gathered",
    "opt_state": "optimizer state",
    "rest": "other state",
}


PLACES = {
    "device": "on each device",
    "host": "in host memory, for each device",
    "disk": "on disk, for each device",
}
WHY = "why replicated"


def size(n: float) -> str:
    """Formats bytes in units of powers of 1000: 1235152404 is "1.24 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(n) < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def replicated_state(rest: Sequence[Leaf]) -> str:
    """Returns a sentence on the extra state that every device replicates; empty below ``MUCH``.

    Args:
      rest: The leaves of the extra state.
    """
    replicated = [leaf for leaf in rest if leaf.reason and not leaf.sharded and leaf.bytes]
    n_bytes = sum(leaf.bytes_per_device for leaf in replicated)
    if n_bytes < MUCH:
        return ""
    largest = max(replicated, key=lambda leaf: leaf.bytes_per_device)
    return (
        f"{size(n_bytes)} of state beside the parameters is replicated on each device: "
        f"{len(replicated)} arrays, the largest {largest.path} {largest.shape} ({largest.reason})"
    )


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Aligns rows of text in columns; the columns numbered in ``right`` are flushed right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flushed = set(right)
    return [
        "  ".join(
            cell.rjust(w) if i in flushed else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def render(
    title: str,
    groups: Mapping[str, Sequence[Leaf]],
    notes: Sequence[str],
    small: int,
) -> str:
    """Renders a plan as text: every parameter and every other large array, the totals, the notes.

    Args:
      title: the first line.
      groups: the plan's leaves by group, see ``GROUPS``.
      notes: further lines, on what changes the numbers.
      small: the most elements of an array that is not large.
    """
    used_places = {leaf.place for leaves in groups.values() for leaf in leaves}
    is_offloaded = used_places != {"device"}
    listed = [*groups["params"], *(x for x in groups["rest"] if math.prod(x.shape) > small)]
    rows = [
        (
            "parameter",
            "shape",
            "dtype",
            "spec",
            "bytes/device",
            *(["in"] if is_offloaded else []),
            WHY,
        )
    ]
    rows += [
        (
            leaf.path,
            "x".join(map(str, leaf.shape)) or "scalar",
            str(leaf.dtype),
            str(leaf.spec).replace("PartitionSpec", "P"),
            size(leaf.bytes_per_device),
            *([leaf.place] if is_offloaded else []),
            leaf.reason,
        )
        for leaf in listed
    ]
    totals = totals_rows(groups)
    right = range(1, len(totals[0]))
    lines = [title, "", *columns(rows, right=(4,)), "", *columns(totals, right=right)]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def totals_rows(groups: Mapping[str, Sequence[Leaf]]) -> list[tuple[str, ...]]:
    """Returns the bytes of each group, in all and per device in each place, after a header."""
    used_places = {leaf.place for leaves in groups.values() for leaf in leaves}
    places = [place for place in PLACES if place in used_places]
    heads = ["bytes/device"] if places == ["device"] else [PLACES[place] for place in places]
    return [
        ("", "bytes in all", *heads),
        *(
            (
                GROUPS[name],
                size(sum(leaf.bytes for leaf in leaves)),
                *(
                    size(sum(leaf.bytes_per_device for leaf in leaves if leaf.place == place))
                    for place in places
                ),
            )
            for name, leaves in groups.items()
            if leaves
        ),
    ]
