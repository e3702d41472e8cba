"""The tables of `zerojax plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from rich.table import Table
from rich.text import Text

from zerojax.cli import terminal
from zerojax.cli.planned import Planned
from zerojax.devices.topology import device_kinds
from zerojax.foresight.attribution import GAPS, KINDS, OTHER
from zerojax.foresight.choice import Remat, changes
from zerojax.foresight.forecast import Forecast, ProgramCost, Traffic
from zerojax.foresight.trials import Trial
from zerojax.plan.table import size
from zerojax.xla.compiler import SLOP, SLOP_FACTOR, memory_limit

_BAR = 24

ATTENTION: dict[str | None, str] = {
    None: "",
    "plain": "",
    "mosaic_gpu": ", attention by tokamax's kernel",
    "cudnn": ", attention by cuDNN (assumed where no cuDNN is)",
}

_MEANINGS = {
    OTHER: "other: temporaries of none of these kinds, such as XLA's copies in another layout",
    GAPS: "gaps: free memory between the temporaries of the peak (fragmentation)",
}


def show(planned: Planned) -> None:
    """Prints the needs of a step and, if searched for, the settings with which it fits."""
    console = terminal.console()
    for part in _parts(planned, "█" if console.encoding.startswith("utf") else "#"):
        text = Text(part) if isinstance(part, str) else part
        console.print(text, soft_wrap=isinstance(text, Text))


def _parts(planned: Planned, mark: str) -> Iterator[str | Text | Table]:
    """Yields lines and tables; `mark` draws the bars."""
    forecast = planned.forecast
    yield from _title(planned)
    yield _memory(planned, mark)
    if len(forecast.programs) > 1:
        yield _programs(forecast)
    yield from _about_memory(planned)
    if forecast.traffic:
        yield _traffic(forecast)
        yield "hidden: the share of the time in which the device computes meanwhile"
    yield from _about_time(forecast)
    if planned.remedies:
        yield "\nWhat fits, cheapest first, each compiled:"
        yield _remedies(planned, planned.remedies)
    elif planned.remedies is not None:
        yield Text.from_markup(
            "[bold red]No other setting of this batch that was compiled fits:[/] take more "
            "devices, fewer rows (--batch) or fewer tokens (--seq)"
        )


def duration(seconds: float) -> str:
    """Formats seconds in a suitable unit.

    Example:
      >>> duration(0.0123), duration(2e-6), duration(83.25)
      ('12.3 ms', '2 us', '83.2 s')
    """
    for unit, parts in (("s", 1.0), ("ms", 1e3)):
        if seconds * parts >= 1:
            return f"{seconds * parts:.3g} {unit}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.3g} us"


def _title(planned: Planned) -> Iterator[str]:
    forecast, choice = planned.forecast, planned.choice
    yield (
        f"{planned.asked.model}, {forecast.parameters:,} parameters, {planned.config}, "
        f"{forecast.devices} x {forecast.rates.kind}{_axes(forecast)}"
    )
    words: dict[Remat, str] = {None: "", True: ", remat", False: ", no remat"}
    remat = words.get(choice.remat, f", remat {choice.remat}")
    offload = "" if choice.offload == "none" else f", {choice.offload} offloaded"
    yield (
        f"stage {choice.stage}{offload}{remat}, batch {planned.rows} = {choice.micro} x "
        f"{choice.accumulation} x {forecast.row_devices} (micro-batch x accumulation x devices"
        f"{' of a stage' if planned.schedule else ''}), "
        f"{planned.asked.seq} tokens in a row{ATTENTION[planned.attention]}"
    )
    if (schedule := planned.schedule) is not None:
        yield (
            f"pipeline: GPipe, {schedule.stages} stages, {schedule.micro_batches} "
            f"micro-batches in {schedule.ticks} ticks, in {schedule.bubble:.0%} of which a stage "
            f"idles (the bubble); a stage keeps activations of all of them; "
            f"{size(forecast.boundary)} at a boundary"
        )


def _axes(forecast: Forecast) -> str:
    """Formats the axes of a mesh with several axes; "" for one axis."""
    sizes = forecast.plan.mesh.shape
    written = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f" ({written})" if len(sizes) > 1 else ""


def _memory(planned: Planned, mark: str) -> Table:
    """Builds the table of memory by kind; the larger of device memory and peak scales the bars."""
    forecast = planned.forecast
    peak, memory = forecast.peak, forecast.rates.memory
    width = _BAR / max(memory, peak.bytes)

    def line(name: str, n: int) -> tuple[str, str, str]:
        return name, size(n), mark * round(n * width)

    kinds = [line(kind, peak.memory[kind]) for kind in KINDS if kind in peak.memory]
    heads = ("memory of a device", ">bytes", "")
    table = terminal.table({head: itemgetter(i) for i, head in enumerate(heads)}, kinds)
    table.add_section()
    table.add_row(*line("total", peak.bytes), style="bold")
    table.add_row(*line("device memory", memory))
    table.add_row(
        "reserve", size(memory - forecast.rates.room), "for the driver, NCCL and the allocator"
    )
    if forecast.fits:
        table.add_row("headroom", size(forecast.headroom), style="bold green")
    else:
        table.add_row("does not fit by", size(-forecast.headroom), style="bold red")
    return table


def _programs(forecast: Forecast) -> Table:
    columns: dict[str, Callable[[ProgramCost], str]] = {
        "program": lambda each: each.name,
        ">memory of a device": lambda each: size(each.bytes),
        ">time": lambda each: duration(each.seconds),
        ">compile": lambda each: duration(each.compile.seconds),
        "": lambda each: "the peak above" if each is forecast.peak else "",
    }
    return terminal.table(columns, forecast.programs)


def _about_memory(planned: Planned) -> Iterator[str]:
    forecast = planned.forecast
    yield from (text for kind, text in _MEANINGS.items() if kind in forecast.peak.memory)
    last = forecast.programs[-1]
    if last.compile.refused:
        yield f"XLA refuses {last.name!r}: it needs at least this much memory."
    elif not forecast.is_complete:
        yield f"{last.name!r} does not fit; the programs after it were not compiled."
    yield from (*forecast.plan.live.notes, *forecast.plan.fp8.notes)
    yield from _about_xlas_limit(planned)
    if forecast.host_bytes:
        yield f"host memory, for each device: {size(forecast.host_bytes)}"
    if forecast.disk_bytes:
        yield f"disk, for each device: {size(forecast.disk_bytes)}"
    if planned.fraction is not None:
        share = forecast.peak.bytes / forecast.rates.memory
        yield (
            f"The step takes {share:.0%} of the device's memory, "
            "and JAX preallocates 75% by default: set "
            f"XLA_PYTHON_CLIENT_MEM_FRACTION={planned.fraction:.2f}"
        )


def _about_xlas_limit(planned: Planned) -> Iterator[str]:
    """Says where a step exceeds XLA's limit of memory, and warns if XLA recomputes values."""
    forecast = planned.forecast
    peak, recomputed = forecast.peak, sum(each.again.instructions for each in forecast.programs)
    limit = memory_limit(forecast.rates.memory, peak.arguments)
    if forecast.rates.kind in device_kinds()["gpu"] and peak.bytes > limit:
        if peak.compile.slop > SLOP:
            yield (
                f"The step exceeds XLA's limit of {size(limit)}, which zerojax raises so that "
                f"collectives overlap: {SLOP_FACTOR}={peak.compile.slop}"
            )
        elif forecast.devices > 1:
            yield (
                f"warning: the step exceeds XLA's limit of {size(limit)}, above which no "
                "collective overlaps: lower the micro-batch, offload more, or take more devices"
            )
    begins = forecast.recomputes_above
    if recomputed and begins is not None:
        yield (
            f"warning: XLA recomputes {recomputed} values to save memory, "
            f"{size(forecast.bytes_again)} and {duration(forecast.seconds_again)} of a step; XLA "
            f"does so where it estimates that a program needs more than {size(begins)}: lower the "
            "micro-batch, offload, or let blocks keep less (--remat, or the policy that "
            "`zerojax fit` finds)"
        )


def _traffic(forecast: Forecast) -> Table:
    columns: dict[str, Callable[[Traffic], str]] = {
        "traffic of a step": lambda each: each.kind,
        "dtypes": lambda each: ", ".join(each.dtypes),
        ">times": lambda each: f"{each.times:,}",
        ">sent a device": lambda each: size(each.bytes),
        ">between nodes": lambda each: size(each.between_nodes) if crosses else "",
        ">time": lambda each: duration(each.seconds),
        ">hidden": lambda each: f"{each.hidden:.0%}",
    }
    crosses = any(each.between_nodes for each in forecast.traffic)
    return terminal.table(columns, forecast.traffic)


def _about_time(forecast: Forecast) -> Iterator[str]:
    links, reached = forecast.rates.links, forecast.rates.reached
    shares = reached.shares
    if any(each.between_nodes for each in forecast.traffic):
        yield (
            f"links of a device, each way: {links.name} {links.inside / 1e9:g} GB/s inside a "
            f"node, {links.between / 1e9:g} GB/s ({links.between * 8 / 1e9:g} Gb/s) between nodes"
        )
    if forecast.is_complete:
        tokens = f", {forecast.tokens_per_second:,.0f} tokens/s" if forecast.tokens else ""
        yield f"predicted step time: {duration(forecast.seconds)}{tokens}, MFU {forecast.mfu:.1%}"
        yield (
            f"  a roofline model: of their peaks matrix products reach {shares['matrix']:.0%}, "
            f"device memory {shares['memory']:.0%}, host copies {shares['host']:.0%}, as "
            f"measured on an H200, and links {shares['link']:.0%}, which is an assumption"
        )
        if links.name == "NVLink":
            kinds = " and ".join(f"{kind}s {share:.0%}" for kind, share in reached.nvlink.items())
            yield f"  on NVLink {kinds}, as published"
    yield f"compiled in {duration(forecast.compile_seconds)}"


def _remedies(planned: Planned, remedies: Sequence[Trial]) -> Table:
    columns: dict[str, Callable[[Trial], str]] = {
        "set": lambda each: ", ".join(changes(planned.choice, each.choice)),
        ">total": lambda each: size(each.forecast.peak.bytes),
        ">headroom": lambda each: size(each.forecast.headroom),
        ">host": lambda each: size(each.forecast.host_bytes),
        ">step": lambda each: duration(each.seconds),
    }
    return terminal.table(columns, remedies)
