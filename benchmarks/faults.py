"""Faults of launched training: their ends, seconds, lost steps, and the next launch.

    python -m benchmarks.faults --record benchmarks/records    # as root; 8 minutes

Two processes train on the CPU (benchmarks/launch_training.py). Every fault in turn ends them, and
the next launch goes on in the same folder. All losses, and the parameters at the end, are to be
those of an uninterrupted run, bit for bit. Then processes of one run of four are killed at random
moments (benchmarks/random_kills.py). The network is cut between two namespaces, by mpirun, as root.
"""

import argparse
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.random_kills import HEAD as KILLS_HEAD
from benchmarks.random_kills import random_kills, steps_for
from benchmarks.supervised import (
    Process,
    Results,
    Training,
    checksum,
    load,
    losses,
    undisturbed,
    way_on,
)

RECORD = (
    "Two processes, then four, on the CPU, stage 3, a save every 5 steps. Lost are the steps that "
    "the next launch repeats. Bit for bit: all losses after that, and the parameters at the "
    "end, are an uninterrupted run's."
)
PAUSE = 0.1
PREEMPTED, STALLED = 75, 76
TWO_HOSTS = str(Path(__file__).with_name("two_hosts.sh"))
HEAD = ("fault", "to the end of all processes", "status", "lost", "the next launch goes on")
KILL = signal.SIGKILL


Act = Callable[[Training, list[Process]], object]


class Fault(NamedTuple):
    """A fault, and what is expected of it.

    Attributes:
      name: The fault's name in the table.
      moment: Waits for the moment of the fault, and returns the training's processes.
      act: Does the fault, to these processes of a training.
      status: The expected exit status of the launch.
      seconds: The most seconds from ``act`` until no process of the launch is left.
      says: A pattern that the launcher's last message has to match; "" where it says nothing.
      options: Options of ``zerojax launch`` besides those of every fault.
      two_hosts: Whether the two processes are on two hosts.
    """

    name: str
    moment: Callable[[Training], list[Process]]
    act: Act
    status: int
    seconds: float
    says: str = ""
    options: tuple[str, ...] = ()
    two_hosts: bool = False


def before_the_join(training: Training) -> list[Process]:
    processes = training.processes()
    time.sleep(0.5)
    if any((each.run_dir / f"joined.{i}").exists() for i, each in enumerate(processes)):
        raise RuntimeError("the processes have joined already")
    return processes


def in_a_step(training: Training) -> list[Process]:
    """Waits until two steps after the first save of this attempt."""
    return after_step(training, 2)


def before_a_save(training: Training) -> list[Process]:
    return after_step(training, Training.EVERY - 1)


def after_step(training: Training, more: int) -> list[Process]:
    """Waits until ``more`` steps after the first save of this attempt."""
    begun = int(training.output.wait(r"begins after step (\d+)")[0])
    first = (begun // Training.EVERY + 1) * Training.EVERY
    training.output.wait(rf"step ({first + more}) loss", training.count)
    return training.processes()


def in_a_save(training: Training) -> list[Process]:
    """Waits until a save after the first is half written, and stops process 1 within it."""
    processes = before_a_save(training)
    until = time.monotonic() + 300
    while time.monotonic() < until:
        if training.half_written() is not None:
            os.kill(processes[1].pid, signal.SIGSTOP)
            if training.half_written() is not None:
                return processes
            os.kill(processes[1].pid, signal.SIGCONT)  # the save has just ended
        time.sleep(0.001)
    raise TimeoutError("no save begins")


def to(number: signal.Signals, *victims: int) -> Act:
    """An act that sends a signal to the processes of these numbers."""

    def act(_: Training, processes: list[Process]) -> None:
        for i in victims:
            os.kill(processes[i].pid, number)

    return act


def sigterm_to_both(_: Training, processes: list[Process]) -> None:
    for process in random.Random(0).sample(processes, 2):
        os.kill(process.pid, signal.SIGTERM)
        time.sleep(0.07)


def killed(i: int, number: str = "SIGKILL") -> str:
    return f"process {i} failed first: ended by {number}\n"


def fill_disk(_: Training, processes: list[Process]) -> None:
    """Lets no file of process 1 grow beyond 64 KiB, as if the disk were full."""
    resource.prlimit(processes[1].pid, resource.RLIMIT_FSIZE, (2**16, 2**16))


def cut_network(*_: object) -> None:
    subprocess.run(["ip", "-n", "zjb", "link", "set", "eth0", "down"], check=True)


FAULTS = (
    Fault("SIGKILL in init, before the join", before_the_join, to(KILL, 1), 137, 10, killed(1)),
    Fault("SIGKILL in a step", in_a_step, to(KILL, 1), 137, 10, killed(1)),
    Fault("SIGKILL in a save", in_a_save, to(KILL, 1), 137, 10, killed(1)),
    Fault("SIGKILL of the coordinator", in_a_step, to(KILL, 0), 137, 10, killed(0)),
    Fault("SIGKILL of the launcher", in_a_step, lambda run, _: run.launcher.kill(), -KILL, 10),
    Fault("SIGTERM to one process", in_a_step, to(signal.SIGTERM, 1), PREEMPTED, 15),
    Fault("SIGTERM to both within 100 ms", in_a_step, sigterm_to_both, PREEMPTED, 15),
    Fault(
        "SIGTERM to the launcher",
        in_a_step,
        lambda run, _: run.launcher.terminate(),
        PREEMPTED,
        15,
    ),
    Fault(
        "SIGSTOP of one process, --watchdog 8",
        in_a_step,
        to(signal.SIGSTOP, 1),
        STALLED,
        20,
        r"the stacks of all threads are in .*\n",
        ("--watchdog", "8"),
    ),
    Fault(
        "an exception in one process",
        in_a_step,
        to(signal.SIGUSR1, 1),
        1,
        10,
        r"process 1 failed first: status 1\n\[1\] Traceback(.*\n)*\[1\] RuntimeError: asked .*\n",
    ),
    Fault(
        "sys.exit(3) in one process",
        in_a_step,
        to(signal.SIGUSR2, 1),
        3,
        15,
        r"process 1 failed first: status 3\n\[1\] Traceback(.*\n)*\[1\] SystemExit: 3\n",
    ),
    Fault(
        "a full disk at one process",
        before_a_save,
        fill_disk,
        1,
        20,
        r"process \d failed first: status 1\n(.*\n)*.*process 1: .*File too large(.*\n)*",
    ),
    Fault(
        "the network cut between two hosts",
        in_a_step,
        cut_network,
        134,
        60,
        killed(0, "SIGABRT"),
        two_hosts=True,
    ),
)


class Ended(NamedTuple):
    """A launch that a fault has ended.

    Attributes:
      fault: The fault.
      status: The exit status of the launch; None if it did not end.
      seconds: Seconds from the fault until no process was left.
      text: The output of the launch.
      saved: The last step whose save is complete on the disk.
      problems: What is not as expected, a sentence each.
    """

    fault: Fault
    status: int | None
    seconds: float
    text: str
    saved: int
    problems: list[str]


def end(fault: Fault, folder: Path, steps: int, count: int = 2) -> Ended:
    """Trains until a fault ends the launch."""
    options = ["--nproc-per-node", str(count)]
    on: tuple[str, ...] = ()
    environ = {}
    with contextlib.ExitStack() as stack:
        if fault.two_hosts:
            stack.enter_context(two_hosts())
            (folder / "hosts").write_text("zja slots=1\nzjb slots=1\n")
            options = ["--hostfile", str(folder / "hosts")]
            on, environ = (TWO_HOSTS, "on", "zja"), {"OMPI_MCA_plm_rsh_agent": TWO_HOSTS}
        options += fault.options
        name = re.sub(r"\W+", "-", fault.name)
        training = Training(
            folder, name, *options, count=count, steps=steps, pause=PAUSE, on=on, environ=environ
        )
        stack.enter_context(training)
        processes = fault.moment(training)
        start = time.monotonic()
        fault.act(training, processes)
        while (left := alive(training, fault)) and time.monotonic() - start < 2 * fault.seconds:
            time.sleep(0.02)
        seconds = time.monotonic() - start
        status = None if left else training.launcher.wait()
        saved = training.saved_steps()[-1]
        text, last = training.output.text(), training.last_words()
    problems = []
    if status != fault.status:
        problems.append(f"status {status}, not {fault.status}")
    if seconds > fault.seconds:
        problems.append(f"{seconds:.1f} s, not {fault.seconds:g}")
    if left:
        problems.append(f"processes left behind: {len(left)}")
    if fault.says and not re.fullmatch(fault.says, last):
        problems.append(f"last words: {last[:200]!r}")
    if fault.moment is in_a_save and training.half_written() is None:
        problems.append("the save had ended")
    return Ended(fault, status, seconds, text, saved, problems)


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Sets up the network namespaces zja and zjb, as two hosts, for a ``with`` block."""
    subprocess.run([TWO_HOSTS, "down"], check=True)
    subprocess.run([TWO_HOSTS, "up"], check=True)
    try:
        yield
    finally:
        subprocess.run([TWO_HOSTS, "down"], check=True)


def alive(training: Training, fault: Fault) -> list[int]:
    """Ids of all that the launch has started, mpirun's daemons too."""
    found = training.alive()
    for host in ("zja", "zjb") * fault.two_hosts:
        pids = ["ip", "netns", "pids", host]
        output = subprocess.run(pids, check=True, capture_output=True, text=True).stdout
        found += map(int, output.split())
    return found


def has_namespaces() -> bool:
    """Returns whether this machine can set up two hosts, and reach them."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare", "mpirun")))


def matrix(faults: Sequence[Fault], folder: Path) -> Results:
    """Lets each fault in turn end one training, with which the next launch goes on."""
    steps = 7 * len(faults) + 5
    (folder / "alone").mkdir()
    baseline = undisturbed(folder / "alone", 2, steps)
    ended = []
    for fault in faults:
        ended.append(end(fault, folder, steps))
        say(f"{fault.name}: {ended[-1].seconds:.1f} s {'; '.join(ended[-1].problems)}")
    texts = [*(each.text for each in ended), undisturbed(folder, 2, steps)]
    rows, problems = [], []
    for each, following in zip(ended, texts[1:], strict=True):
        way = way_on(each.text, following, each.saved, losses(baseline))
        wrong = each.problems + way.problems
        if each.status == PREEMPTED and way.lost:
            wrong.append("the processes did not save the step that they left at")
        problems += [f"{each.fault.name}: {problem}" for problem in wrong]
        goes_on = "; ".join(wrong) or f"after step {way.after}, bit for bit"
        row = (f"{each.seconds:.1f} s", str(each.status), f"{way.lost} steps", goes_on)
        rows.append((each.fault.name, *row))
    ends = {checksum(baseline), checksum(texts[-1])}
    if len(ends) > 1 or "" in ends:
        problems.append(f"the parameters at the end differ: {ends}")
    return Results(rows, problems)


def with_fewer(folder: Path, baseline: str, most: float = 10.0) -> Results:
    """Kills one of four processes, and lets two go on in the same folder.

    Args:
      baseline: The output of four uninterrupted processes, whose losses the two must repeat.
      most: The most seconds from the kill until no process is left.
    """
    fault = Fault("SIGKILL of one of four", in_a_step, to(KILL, 3), 137, most, killed(3))
    steps = 15
    ended = end(fault, folder, steps, 4)
    following = undisturbed(folder, 2, steps)
    way = way_on(ended.text, following, ended.saved, losses(following))
    got = {step: float(min(each)) for step, each in losses(following).items()}
    right = {step: float(min(each)) for step, each in losses(baseline).items()}
    distance = max(abs(loss / right[step] - 1) for step, loss in got.items())
    problems = ended.problems + way.problems
    if distance > 1e-6 or steps not in got:
        problems.append(f"losses differ by {distance:.1e}")
    goes_on = (
        "; ".join(problems) or f"with two after step {way.after}, losses within {distance:.0e}"
    )
    row = (f"{ended.seconds:.1f} s", str(ended.status), f"{way.lost} steps", goes_on)
    return Results([(fault.name, *row)], problems)


@question(
    "faults",
    "Faults",
    argument("--kills", type=int, default=20, help="at random moments of one run"),
    argument("--seed", type=int, default=0),
    argument("--only", help="faults with this in their names, and no random kills"),
)
def main(options: argparse.Namespace) -> Answer:
    os.environ["JAX_PLATFORMS"] = "cpu"
    folder = Path(tempfile.mkdtemp(prefix="zerojax-faults-"))
    faults = [x for x in FAULTS if (options.only or "") in x.name]
    if not has_namespaces():
        faults = [x for x in faults if not x.two_hosts]
    results = matrix(faults, created(folder / "matrix"))
    rows, problems = [HEAD, *results.rows], results.problems
    kills: list[Sequence[str]] = []
    if options.only is None:
        baseline = undisturbed(created(folder / "four"), 4, steps_for(options.kills))
        fewer = with_fewer(created(folder / "fewer"), baseline)
        killed = random_kills(created(folder / "kills"), options.kills, options.seed, baseline)
        rows += fewer.rows
        kills = [KILLS_HEAD, *killed.rows]
        problems = problems + fewer.problems + killed.problems
    say(f"Outputs are in {folder}.")
    tables = [Table(each, texts=len(HEAD)) for each in (rows, kills) if each]
    return Answer(
        {"faults": rows, "kills": kills, "problems": problems},
        [RECORD, *tables],
        missed=problems,
        machine=load(),
    )


def created(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    main()
