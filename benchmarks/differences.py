"""Random differences between two processes: each ends in an error soon, or in plain jit's numbers.

    python -m benchmarks.differences --record benchmarks/records    # 10 minutes on two cores
    python -m benchmarks.differences --seed 1 --count 5

Two processes train on the CPU (benchmarks/differing.py), one of which differs from some step on: in
the form of its batch, its arguments, its configuration or the order and the number of its calls.
"""

import argparse
import json
import os
import random
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.differing import KINDS, STEPS, Difference, plain
from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.supervised import launch, load

MOST, SHOWN = 30.0, 260  # s, characters
RECORD = (
    f"Two processes on the CPU, {STEPS} steps. An error within {MOST:g} s of the difference that "
    "says what differs, or the losses of one plain process on the whole batch, within 1e-5."
)
HEAD = ("difference", "process, step", "stage, micro-batches", "late", "seconds", "outcome")


class Outcome(NamedTuple):
    """The end of two processes.

    Attributes:
      seconds: Seconds from the difference to the end of both.
      status: Exit status of the launch; None if it was still running.
      text: The output of both.
    """

    seconds: float
    status: int | None
    text: str


def drawn(seed: int, count: int) -> list[Difference]:
    """Draws differences, each kind once before any comes again."""
    of = random.Random(seed)
    kinds = [kind for _ in range(-(-count // len(KINDS))) for kind in of.sample(KINDS, len(KINDS))]
    return [
        Difference(
            kind,
            who=of.randrange(2),
            at=of.choice([0, 1, 2, STEPS - 2]),
            lasts=of.random() < 0.5,
            stage=of.randrange(4),
            micro_batches=of.choice([1, 1, 2]),
            late=of.randrange(2) if kind == "only late" else of.randrange(-1, 2),
            seconds=of.choice([1.0, 4.0]),
        )
        for kind in kinds[:count]
    ]


def ended(difference: Difference, folder: Path) -> Outcome:
    """Runs two processes to their end, or to twice the seconds that they may take."""
    out, described = folder / "out", json.dumps(difference._asdict())
    with out.open("wb") as file:
        process = subprocess.Popen(
            launch("--nproc-per-node", "2", "-m", "benchmarks.differing", described),
            cwd=Path(__file__).parents[1],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    begin, start = time.monotonic(), None
    while (status := process.poll()) is None and time.monotonic() - begin < 300:
        if start is None and (found := re.search(r"differs at (\S+)", out.read_text())):
            start = float(found[1])
        if start is not None and time.time() - start > 2 * MOST:
            process.terminate()
            process.wait()
            break
        time.sleep(0.02)
    seconds = time.time() - start if start else time.monotonic() - begin
    return Outcome(seconds, status, out.read_text(errors="replace"))


def judged(difference: Difference, outcome: Outcome) -> tuple[str, str]:
    """Returns what happened, and what is wrong with it; "" if nothing is."""
    if outcome.status is None:
        return "stuck", f"stuck for {outcome.seconds:.0f} s"
    if outcome.status == 0:
        right = plain(difference)
        told = [(int(n), float(x)) for n, x in re.findall(r"step (\d+) loss (\S+)", outcome.text)]
        worst = max((abs(x / right[n] - 1) for n, x in told if n in right), default=1.0)
        if worst < 1e-5 and len(told) >= STEPS:
            return f"{len(told)} losses of plain jit, within {worst:.0e}", ""
        return "other losses, silently", f"silent: losses differ by {worst:.1e}"
    errors = re.findall(r"^\[\d\] [a-z_.]*(\w*(?:Error|Missing)): ([^`]*)", outcome.text, re.M)
    said = ": ".join(errors[0]) if errors else outcome.text[-300:]
    said = re.sub(r"\s*\n\[\d\]\s*", " ", said)
    said = re.split(r" ----| Traceback| zerojax\.|\n", said)[0][:SHOWN]
    slow = f"{outcome.seconds:.0f} s" if outcome.seconds > MOST else ""
    return f"`{said}`", slow  # as code: a page reads `['params']['bias']` as a link


@question(
    "differences",
    "Differences between two processes",
    argument("--count", type=int, default=30),
    argument("--seed", type=int, default=0),
    argument("--only", help="differences with this in their names"),
)
def main(options: argparse.Namespace) -> Answer:
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="zerojax-differences-"))
    rows, problems = [HEAD], []
    for number, each in enumerate(drawn(options.seed, options.count)):
        if (options.only or "") not in each.kind:
            continue
        (own := folder / f"{number}").mkdir()
        outcome = ended(each, own)
        what, wrong = judged(each, outcome)
        if wrong:
            problems.append(f"{number + 1}, {each.kind}: {wrong}")
        late = f"{each.seconds:g} s in {each.late}" if each.late >= 0 else ""
        where = f"{each.who}, {each.at + 1}{' on' * each.lasts}"
        form = f"{each.stage}, {each.micro_batches}"
        rows.append(
            (f"{number + 1}, {each.kind}", where, form, late, f"{outcome.seconds:.1f}", what)
        )
        say(" | ".join(rows[-1]) + f" {wrong.upper()}")
    say(f"Outputs are in {folder}.")
    return Answer(
        {"differences": rows, "problems": problems},
        [RECORD, Table(rows, texts=len(HEAD))],
        missed=problems,
        machine=load(),
    )


if __name__ == "__main__":
    main()
