"""SIGKILLs of random processes of one run, at random moments of init, steps and saves.

    python -m benchmarks.random_kills --record benchmarks/records    # 15 minutes on two cores

Each form of the state trains on two devices of one process, then a ``TrainState`` in two processes.
All kills come after the first save. All losses, and the state at the end, are to be those of an
uninterrupted run, bit for bit.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import Answer, Table, argument, question
from benchmarks.launch_training import FORMS
from benchmarks.supervised import (
    Results,
    Training,
    began_after,
    checksum,
    load,
    losses,
    seconds_until_gone,
    undisturbed,
    way_on,
)

HEAD = ("kill", "of process", "to the end of the attempt", "lost", "the next attempt goes on")
MOMENTS = ("init", "steps", "a save")
RECORD = (
    "On the CPU, stage 3, a save every 5 steps, each kill after the first. Bit for bit: all losses "
    "of all attempts, and every array of the state at the end, are an uninterrupted run's."
)
MOST = 10.0
"""Seconds from a kill to the end of an attempt."""
INIT_SECONDS = 3.0
"""From the start of a process to its first step, about."""


def steps_for(count: int) -> int:
    """A number of steps that a run does not reach before it was killed so many times."""
    return 15 * count + 10


def random_kills(
    folder: Path, count: int, seed: int, baseline: str, processes: int = 4, form: str = ""
) -> Results:
    """Kills processes of a run, which starts again by itself.

    Args:
      folder: The folder of the run.
      count: The number of kills, a third each in the init, the steps and the saves of an attempt.
      seed: The seed of the random moments and processes.
      baseline: The output of an uninterrupted run of :func:`steps_for` steps.
      processes: The number of processes.
      form: The form of the state; "" for a ``TrainState``.
    """
    random_of = random.Random(seed)
    moments = [MOMENTS[i % 3] for i in range(count)]
    random_of.shuffle(moments)
    options = ("--nproc-per-node", str(processes), "--max-restarts", str(count))
    kills, folders = [], set[Path]()
    with Training(
        folder, "kills", *options, count=processes, steps=steps_for(count), pause=0.05, form=form
    ) as training:
        for number, moment in enumerate(moments):
            begun = training.processes(folders)
            folders |= {process.run_dir for process in begun}
            while form and training.saved_steps() == [0] and training.launcher.poll() is None:
                time.sleep(0.01)
            wait_for(moment, training, number, random_of)
            victim, saved = random_of.randrange(processes), training.saved_steps()[-1]
            os.kill(begun[victim].pid, signal.SIGKILL)
            seconds = seconds_until_gone([process.pid for process in begun])
            attempt = training.attempts()[number]
            if began_after(attempt) is None:
                hit = "init"
            else:
                hit = "a save" if training.half_written() in losses(attempt) else "steps"
            kills.append((hit, victim, seconds, saved))
            print(f"kill {number + 1} in {hit}: {seconds:.1f} s", flush=True)
        status = training.launcher.wait(300)
        attempts = training.attempts()
    rows, problems = [], []
    for number, (hit, victim, seconds, saved) in enumerate(kills):
        following = next((x for x in attempts[number + 1 :] if began_after(x) is not None), "")
        way = way_on(attempts[number], following, saved, losses(baseline))
        wrong = way.problems + [f"{seconds:.1f} s"] * (seconds > MOST)
        problems += [f"kill {number + 1} in {hit}: {problem}" for problem in wrong]
        goes_on = "; ".join(wrong) or f"after step {way.after}, bit for bit"
        row = (str(victim), f"{seconds:.1f} s", f"{way.lost} steps", goes_on)
        rows.append((f"{number + 1}, in {hit}", *row))
    if status or checksum(attempts[-1]) != checksum(baseline) or not checksum(baseline):
        problems.append(f"random kills: status {status}, parameters {checksum(attempts[-1])}")
    return Results(rows, problems)


def wait_for(moment: str, training: Training, number: int, random_of: random.Random) -> None:
    """Waits for a random moment of an attempt."""
    if moment == "init":
        return time.sleep(random_of.uniform(0, INIT_SECONDS))
    until = time.monotonic() + 300
    while (begun := began_after(training.attempts()[number])) is None:
        if time.monotonic() > until:
            raise TimeoutError(training.output.text())
        time.sleep(0.02)
    if moment == "steps":
        step = begun + random_of.randint(1, 2 * Training.EVERY)
        while step not in losses(training.attempts()[number]) and time.monotonic() < until:
            time.sleep(0.01)
        return time.sleep(random_of.uniform(0, 0.05))
    while time.monotonic() < until:
        if training.half_written() in losses(training.attempts()[number]):
            break
        time.sleep(0.001)
    return time.sleep(random_of.uniform(0, 0.05))


@question(
    "random_kills",
    "Random kills of each form of the state",
    argument("--kills", type=int, default=30, help="of each form"),
    argument("--seed", type=int, default=0),
)
def main(options: argparse.Namespace) -> Answer:
    folder = Path(tempfile.mkdtemp(prefix="zerojax-kills-"))
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    rows: list[Sequence[str]] = [("form", "kills", *MOMENTS, "lost", "at the end")]
    problems: list[str] = []
    for form, processes in (*((form, 1) for form in FORMS[1:]), (FORMS[0], 2)):
        name = form + f", {processes} processes" * (processes > 1)
        (alone := folder / name / "alone").mkdir(parents=True)
        (killed := folder / name / "killed").mkdir()
        baseline = undisturbed(alone, processes, steps_for(options.kills), form)
        found = random_kills(killed, options.kills, options.seed, baseline, processes, form)
        hits = [sum(f"in {moment}" in row[0] for row in found.rows) for moment in MOMENTS]
        lost = max(int(row[3].partition(" ")[0]) for row in found.rows)
        ended = "; ".join(found.problems) or "bit for bit"
        rows.append((name, f"{len(found.rows)}", *map(str, hits), f"{lost} steps at most", ended))
        problems += [f"{name}: {problem}" for problem in found.problems]
    return Answer(
        {"kills": rows, "problems": problems},
        [RECORD, Table(rows)],
        missed=problems,
        machine=load(),
    )


if __name__ == "__main__":
    main()
