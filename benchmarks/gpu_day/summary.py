"""The tables of a ``gpu_day``, and the changes that they propose to files of measured values."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import kernels as kernel_tables
from benchmarks import prediction
from benchmarks.gpu_day import calibration, forecasts, kernels, plan
from benchmarks.gpu_day.journal import CUT
from benchmarks.gpu_day.measurement import ERROR, PARTS, Measurement, errors
from benchmarks.report import heading, markdown_table

Table = list[list[str]]


def overview(wanted: Sequence[Measurement], results: Mapping[str, Any]) -> Table:
    """A line for each measurement: figures or the error; before it has run, expected seconds."""
    lines = [["part", "measurement", "s", "figures"]]
    for each in wanted:
        found = results.get(each.name)
        took = f"({each.seconds:.0f})" if found is None else f"{found.get('in_all', 0.0):.0f}"
        lines.append([f"{each.part} {PARTS[each.part - 1]}", each.name, took, _says(found)])
    return lines


def _says(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "owed"
    wrong = [f"{path}: {text}" if path else text for path, text in errors(found)]
    if CUT in found:
        wrong.append(f"cut off {found[CUT]}")
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return f"ERROR {wrong[0][:150]}{more}"
    if trained := ways({"": found}):
        return ", ".join(
            f"{name.removeprefix(', ')} {each['tokens_per_second']:,.0f} tokens/s"
            for name, each in trained.items()
        )
    shown = [
        *_shown(found, "tokens_per_second", "{:,.0f} tokens/s"),
        *_shown(found, "mfu", "MFU {:.1%}"),
        *_shown(found, "seconds", "{:.4f} s"),
        *_shown(found, "bytes", "{:.3e} B"),
    ]
    return ", ".join(shown) or f"ok, {len(found)} figures"


def _shown(found: Mapping[str, Any], key: str, form: str) -> list[str]:
    return [form.format(found[key])] if isinstance(found.get(key), int | float) else []


def steps(results: Mapping[str, Any]) -> Table:
    """Training steps, beside plain jit's of the same model."""
    lines = [["step", "rows x tokens", "ms", "turns", "tokens/s", "of plain jit's", "MFU", "GB"]]
    for name, found in ways(results).items():
        plain = results.get(name.split(", ")[0], {}).get(plan.PLAIN, {}).get("tokens_per_second")
        rate, share, size = found["tokens_per_second"], found["mfu"], found["bytes"]
        turns = found.get("turns", [found["in_a_row"]])
        lines.append(
            [
                name,
                f"{found['rows']} x {found['seq']}",
                f"{1e3 * found['in_a_row']:.1f}",
                " ".join(f"{1e3 * each:.0f}" for each in turns),
                f"{rate:,.0f}",
                f"{rate / plain:.3f}" if plain else "",
                f"{share:.1%}" if share else "",
                f"{size / 1e9:.2f}" if size else "no statistic",
            ]
        )
    return lines


def ways(results: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of training steps by ``model, way``."""
    found = {}
    for name, result in results.items():
        for key, each in {"": result, **result}.items():
            if isinstance(each, dict) and "in_a_row" in each and "rows" in each:
                model = name.split(", ")[0]
                found[f"{model}, {key}" if key else name] = each
    return found


def cases(results: Mapping[str, Any], device: str) -> Table:
    """Forecasts beside what was measured."""
    known, compared = forecasts.predicted(device), []
    for name, forecast in known.items():
        found = results.get(name, {})
        if "fits" in found and ERROR not in forecast:
            compared.append({"case": name, "predicted": forecast, "measured": found})
    table = prediction.table(compared)
    table[0].append("programs' own bytes")
    for line, each in zip(table[1:], compared, strict=True):
        own = each["measured"].get("compiled")
        line.append(f"{own / 2**30:.2f} GiB" if own else "")
    return table


def shares(results: Mapping[str, Any], device: str) -> dict[str, float]:
    """``device_kinds.json``'s "common" by the device's rates."""
    return forecasts.proposed(results.get("rates of the device", {}), device)


def sections(results: Mapping[str, Any], device: str) -> list[tuple[str, Table | str]]:
    """Titles, and a table or a text for each; what has no figures is left out."""
    found, copy = kernels.costs(r for n, r in results.items() if n.startswith("kernels, "))
    tables: list[tuple[str, Table | str]] = [
        ("Forecasts", cases(results, device)),
        ("Steps", steps(results)),
        ("Instructions", calibration.by_kind(results)),
        ("Kernels", kernel_tables.rows(found, copy)),
    ]
    tables = [(title, table) for title, table in tables if len(table) > 1]
    if proposal := shares(results, device):
        text = ", ".join(f"{name}: {value:.3g}" for name, value in proposal.items())
        tables.append(("Proposed for device_kinds.json, common", text))
    if found:
        tables.append(
            ("Proposed for pallas_kernels/measured.py", f"FASTER = {kernels.faster(found, device)}")
        )
    return tables


def markdown(wanted: Sequence[Measurement], results: Mapping[str, Any], device: str) -> str:
    """The record."""
    parts = [heading("A day on a GPU", f", {device}"), markdown_table(overview(wanted, results), 4)]
    for title, content in sections(results, device):
        text = content if isinstance(content, str) else markdown_table(content)
        parts += [f"## {title}", text]
    return "\n\n".join(parts) + "\n"
