"""The command ``python -m benchmarks.gpu_day``, which the package's docstring describes."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day import plan, summary
from benchmarks.gpu_day.journal import Journal
from benchmarks.gpu_day.measurement import PARTS, Measurement, errors
from benchmarks.gpu_day.processes import Workers
from benchmarks.report import console, console_table

SPARE = 8.0
"""Seconds that the tables take at the end."""


def parts_of(text: str) -> list[int]:
    """``1..3``, ``2`` or ``1,4`` as numbers.

    >>> parts_of("1..3"), parts_of("2,4")
    ([1, 2, 3], [2, 4])
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    if wrong := [n for n in numbers if not 1 <= n <= len(PARTS)]:
        raise argparse.ArgumentTypeError(f"no part {wrong[0]}: parts are 1 to {len(PARTS)}")
    return numbers


def device(toy: bool, needed: bool = True) -> str:
    """The GPU's name by nvidia-smi, which leaves its memory free; "cpu" for a toy.

    "" where there is no GPU and none is needed."""
    if toy:
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if not needed:
            return ""
        raise SystemExit(f"no GPU here ({error}): --toy rehearses on the CPU") from None
    return done.stdout.splitlines()[0].strip()


def run(wanted: Sequence[Measurement], journal: Journal, until: float, workers: Workers) -> None:
    """Runs those of the measurements that the journal lacks, until ``time.monotonic()`` is
    ``until``, and writes each into the journal."""
    every = [each for each in wanted if not journal.known(each.name)]
    owed = [each for each in every if not each.together]

    def note(measurement: Measurement, figures: dict[str, Any]) -> None:
        journal.write(measurement.name, figures)
        for path, text in errors(figures):
            print(f"  {path}: {text[:300]}", file=sys.stderr, flush=True)

    try:
        left = until - time.monotonic()
        if shared := [each for each in every if each.together and each.seconds <= left]:
            names = "; ".join(each.name for each in shared)
            print(f"{left:4.0f} s left: {names}", file=sys.stderr, flush=True)
            longest = max(each.seconds for each in shared)
            for each, figures in zip(shared, workers.together(shared, longest), strict=True):
                note(each, figures)
        for at, each in enumerate(owed):
            left = until - time.monotonic()
            if each.seconds > left:
                continue
            print(f"{left:4.0f} s left: {each.name}", file=sys.stderr, flush=True)
            later = any(other.seconds <= left for other in owed[at + 1 :])
            note(each, workers.run(each, left, later))
    finally:
        workers.close()


def main(arguments: Sequence[str] | None = None) -> None:
    begun = time.monotonic() - time.process_time()  # the imports were this process's work so far
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description="Everything that a GPU owes us."
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="at the most, tables included")
    parser.add_argument("--part", type=parts_of, default=[*range(1, 7)], help="as 1..3 or 2,4")
    parser.add_argument("--only", action="append", default=[], help="only these names")
    parser.add_argument("--record", type=Path, required=True, metavar="OUT", help="a folder")
    parser.add_argument("--again", action="store_true", help="also what ended with an error")
    parser.add_argument("--toy", action="store_true", help="rehearse on the CPU at toy sizes")
    parser.add_argument("--list", action="store_true", help="print what is owed, run nothing")
    options = parser.parse_args(arguments)
    name = device(options.toy, needed=not options.list)
    journal = Journal(options.record, name)
    wanted = [
        each
        for each in plan.measurements(options.toy)
        if each.part in options.part and (not options.only or each.name in options.only)
    ]
    if options.again:
        for failed in journal.failed():
            journal.forget(failed)
    if not options.list:
        run(wanted, journal, begun + 60 * options.minutes - SPARE, Workers(options.toy))
    out = console()
    out.print(console_table(summary.overview(wanted, journal.results), title=name))
    for title, content in summary.sections(journal.results, name):
        if isinstance(content, str):
            out.print(f"{title}: {content}", markup=False)
        else:
            out.print(console_table(content, title=title))
    if not options.list:
        options.record.mkdir(parents=True, exist_ok=True)
        text = summary.markdown(wanted, journal.results, name)
        (options.record / "gpu-day.md").write_text(text)


if __name__ == "__main__":
    main()
