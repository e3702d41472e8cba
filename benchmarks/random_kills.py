"""SIGKILLs of random processes of one run, at random moments of init, steps and saves."""

import os
import random
import signal
import time
from pathlib import Path

from benchmarks.supervised import (
    Results,
    Training,
    began_after,
    checksum,
    losses,
    seconds_until_gone,
    way_on,
)

HEAD = ("kill", "of process", "to the end of the attempt", "lost", "the next attempt goes on")
MOMENTS = ("init", "steps", "a save")
INIT_SECONDS = 8.0
"""From the start of a process to its first step, about."""


def steps_for(count: int) -> int:
    """A number of steps that a run does not reach before it was killed so many times."""
    return 5 * count + 10


def random_kills(folder: Path, count: int, seed: int, baseline: str, most: float = 10.0) -> Results:
    """Kills processes of a run of four, which starts again by itself.

    Args:
      folder: The folder of the run.
      count: The number of kills, a third each in the init, the steps and the saves of an attempt.
      seed: The seed of the random moments and processes.
      baseline: The output of an uninterrupted run of :func:`steps_for` steps.
      most: The most seconds from a kill to the end of an attempt.
    """
    random_of = random.Random(seed)
    moments = [MOMENTS[i % 3] for i in range(count)]
    random_of.shuffle(moments)
    options = ("--nproc-per-node", "4", "--max-restarts", str(count))
    kills, folders = [], set[Path]()
    with Training(
        folder, "kills", *options, count=4, steps=steps_for(count), pause=0.05
    ) as training:
        for number, moment in enumerate(moments):
            processes = training.processes(folders)
            folders |= {process.run_dir for process in processes}
            wait_for(moment, training, number, random_of)
            victim, saved = random_of.randrange(4), training.saved_steps()[-1]
            os.kill(processes[victim].pid, signal.SIGKILL)
            seconds = seconds_until_gone([process.pid for process in processes])
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
        wrong = way.problems + [f"{seconds:.1f} s"] * (seconds > most)
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
