"""Saving and restoring, beside plain orbax and a plain copy of the files.

    python -m benchmarks.checkpoint                               # 2 GB, five minutes on two cores
    python -m benchmarks.checkpoint --gigabytes 0.25              # two minutes
    python -m benchmarks.checkpoint --record benchmarks/records   # also DATE-checkpoint.md, .json

A state under AdamW at stage 3 on all devices, or 8 virtual ones. zerojax and plain orbax take turns
in one run, after a first turn that does not count, and the disk comes to rest before each timing;
medians are compared; what is written, the copy too, is synced. Peak memory is that of processes of
their own. To expect of 2 GB: at least 0.95 of orbax's speed in saving and restoring, and at most
1.2 times its memory; else the exit status is 1. Much smaller states show fixed costs.
"""

import argparse
import dataclasses
import logging
import shutil
import tempfile
from pathlib import Path

import jax

from benchmarks.checkpoint_memory import Footprint, footprint
from benchmarks.checkpoint_times import CALL, COLD, COPY, NEXT_STEP, STEP, Timing, Turns, take_turns
from benchmarks.frame import Answer, Table, argument, question
from benchmarks.savers import SAVERS
from examples.run_clm.devices import data_mesh

SLOWEST = 0.95  # of orbax's speed
MOST = 1.2  # of orbax's peak memory
UNBOUND = (CALL, STEP, NEXT_STEP)
GIGA, MEGA = 1e9, 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    turns: Turns
    footprints: list[Footprint]

    def peak(self, task: str) -> float:
        """zerojax's peak of host memory over orbax's."""
        ours, orbax = (self.footprint(task, saver).peak for saver in ("zerojax", "orbax"))
        return ours / orbax

    def footprint(self, task: str, saver: str) -> Footprint:
        return next(f for f in self.footprints if (f.task, f.saver) == (task, saver))

    def missed(self) -> list[str]:
        """One line for each limit that was missed."""
        slow = [
            f"{each.what}: {each.speed:.2f} of orbax's speed, less than {SLOWEST}"
            for each in self.turns.timings
            if each.what not in UNBOUND and each.speed < SLOWEST
        ]
        large = [
            f"{task}: {self.peak(task):.2f} of orbax's peak memory, more than {MOST}"
            for task in ("save", "restore")
            if self.peak(task) > MOST
        ]
        return slow + large


def run(gigabytes: float, rounds: int, folder: Path) -> Results:
    """Every figure; ``folder`` is on the disk that is measured."""
    footprints = []
    for saver in SAVERS:
        place = folder / f"{saver}-memory"
        footprints += [footprint(task, saver, place, gigabytes) for task in ("save", "restore")]
        shutil.rmtree(place)
    return Results(
        footprints=footprints, turns=take_turns(gigabytes, rounds, folder, data_mesh(None))
    )


def time_table(turns: Turns) -> list[list[str]]:
    """Headings, and a row for each thing timed."""

    def cell(timing: Timing, by: str) -> str:
        if by not in timing.seconds:
            return "-"
        each = " ".join(f"{s:.3f}" for s in timing.seconds[by])
        rate = turns.state_bytes / timing.median(by) / GIGA
        return f"{timing.median(by):.3f} s" + (
            f" ({each})" if timing.what in UNBOUND else f" = {rate:.2f} GB/s ({each})"
        )

    return [
        ["", "zerojax", "plain orbax", "copy", "orbax's time / zerojax's", "at least"],
        *(
            [
                each.what,
                *(cell(each, by) for by in (*SAVERS, COPY)),
                f"{each.speed:.2f}",
                "-" if each.what in UNBOUND else str(SLOWEST),
            ]
            for each in turns.timings
        ),
    ]


def memory_table(results: Results) -> list[list[str]]:
    """Headings, and a row for each task."""

    def cell(footprint: Footprint) -> str:
        return f"{footprint.peak / MEGA:,.0f} ({footprint.growth / MEGA:+,.0f})"

    return [
        ["peak MB (growth)", "zerojax", "plain orbax", "zerojax's peak / orbax's", "at most"],
        *(
            [
                task,
                *(cell(results.footprint(task, saver)) for saver in SAVERS),
                f"{results.peak(task):.2f}",
                str(MOST),
            ]
            for task in ("save", "restore")
        ),
    ]


def conditions(turns: Turns) -> str:
    """Sizes and conditions of the saves, in prose."""
    disk = ", ".join(f"{size / GIGA:.2f} GB by {by}" for by, size in turns.disk_bytes.items())
    calls = ", ".join(f"{taken:.3f} s by {by}" for by, taken in turns.first_calls.items())
    dropped = "was" if turns.timing(COLD) else "could not be"
    return (
        f"A state of {turns.state_bytes / GIGA:.2f} GB at {turns.devices}; on disk {disk}.\n"
        f"Medians, each turn's seconds in brackets. The page cache {dropped} dropped for the cold "
        f"restores.\nThe first save's call, programs being compiled: {calls}."
    )


def answer(results: Results) -> Answer:
    return Answer(
        dataclasses.asdict(results),
        [
            conditions(results.turns),
            Table(time_table(results.turns), title="Time"),
            Table(memory_table(results), title="Memory"),
        ],
        missed=results.missed(),
        machine=f", {jax.devices()[0].device_kind}",
    )


@question(
    "checkpoint",
    "Saving and restoring, beside plain orbax",
    argument("--gigabytes", type=float, default=2.0),
    argument("--rounds", type=int, default=3),
    argument("--folder", type=Path, help="on the disk to measure; temporary by default"),
)
def main(options: argparse.Namespace) -> Answer:
    if options.gigabytes <= 0 or options.rounds < 1:
        raise SystemExit("give --gigabytes above 0, and --rounds of at least 1")
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax logs every wait
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return answer(run(options.gigabytes, options.rounds, Path(folder)))


if __name__ == "__main__":
    main()
