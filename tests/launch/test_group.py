"""Processes that live and die together, by what a user sees of them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from groups import wait_for
from launch.launched import (
    HEAD,
    LIMIT,
    PATIENT,
    Launch,
    command,
    environment,
    launched,
    launching,
    left_behind,
    living,
)

from zerojax.launch.failure import Outcome
from zerojax.launch.local import attempts

pytestmark = pytest.mark.slow

SLEEP = "time.sleep(3600)"
GRANDCHILD = """
child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
say("grandchild", child.pid)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: say("interrupted", os.getpid()))
say("ready", os.getpid())
"""
PREEMPTIBLE = """
def save(*_):
    time.sleep(0.3 * me)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
say("ready", os.getpid())
time.sleep(3600)
"""


def test_processes_have_numbers_arguments_and_an_address(tmp_path: Path) -> None:
    told = launched(
        tmp_path,
        "say(*sys.argv[1:], *(os.environ['ZEROJAX_' + name] for name in ("
        "'NUM_PROCESSES', 'LOCAL_PROCESSES', 'LOCAL_PROCESS_ID', 'COORDINATOR', 'WATCHDOG')),"
        "os.environ['JAX_NUM_CPU_DEVICES'], os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))",
        "--nproc-per-node=2",
        "--watchdog=30",
        args="--lr 3 -- -m",
    )
    assert told.status == 0, told.err
    lines = sorted(line for line in told.out.splitlines() if "pid" not in line)
    port = lines[0].partition("127.0.0.1:")[2].split()[0]
    assert lines == [f"[{i}] --lr 3 -- -m 2 2 {i} 127.0.0.1:{port} 30 1 None" for i in (0, 1)]
    assert told.err == ""
    assert not list(tmp_path.glob("zerojax-launch-*"))  # the run's folder


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    told = launched(tmp_path, "say(sys.argv[1:], __name__)", "-m", "script", args="-v")
    # `launched` adds the script's path as the module's argument
    assert told.status == 0, told.err
    assert told.out.splitlines()[-1].endswith("script.py', '-v'] __main__")


def test_lines_are_complete_and_bytes_unchanged(tmp_path: Path) -> None:
    told = launched(
        tmp_path,
        """
for line in range(300):
    os.write(1 + line % 2, b"x" * 50)
    os.write(1 + line % 2, b"%d \\xff\\n" % me)
os.write(1, b"no end")
""",
        "--nproc-per-node=3",
        "--log-dir=logs",
    )
    assert told.status == 0
    said = [line for line in told.out.splitlines() + told.err.splitlines() if "x" in line]
    assert len(said) == 900
    assert set(said) == {f"[{i}] {'x' * 50}{i} \N{REPLACEMENT CHARACTER}" for i in range(3)}
    assert told.out.count("no end\n") == 3
    for i in range(3):
        log = (tmp_path / f"logs/attempt-1/{i}.log").read_bytes()
        assert log.count(b"x" * 50 + b"%d \xff\n" % i) == 300
        assert b"\nno end" in log


def test_a_prompt_is_shown_and_a_progress_bar_is_kept(tmp_path: Path) -> None:
    script = "os.write(1, b'\\r10%\\r20%'); until('seen'); os.write(1, b'\\r30%\\n')"
    with launching(tmp_path, script, "--nproc-per-node=1") as launch:
        wait_for(lambda: b"20%" in launch.out.read_bytes(), launch.err.read_text)
        (tmp_path / "seen").touch()
        told = launch.told()
    assert (tmp_path / "out").read_bytes().endswith(b"[0] \r[0] 10%\r[0] 20%\r[0] 30%\n"), told


def test_standard_input_is_the_first_process_s(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("typed")
    told = launched(tmp_path, "say(f'<{sys.stdin.read()}>')", "--nproc-per-node=2")
    assert told.status == 0
    assert {"[0] <typed>", "[1] <>"} < set(told.out.splitlines())


def test_an_exception_ends_all_and_is_shown_once_more(tmp_path: Path) -> None:
    script = "if me == 1: until('go'); raise KeyError('lost')\n" + SLEEP
    with launching(tmp_path, script, "--nproc-per-node=3") as launch:
        pids = launch.pids(3)
        (tmp_path / "go").touch()
        told = launch.told()
    assert told.status == 1
    assert not living(pids)
    last = told.err.rpartition("zerojax launch: ")[2].splitlines()
    assert last[0] == "process 1 failed first: status 1"
    assert last[1] == "[1] Traceback (most recent call last):"
    assert last[-1] == "[1] KeyError: 'lost'"
    assert told.err.count("zerojax launch: ") == 1


def test_the_earliest_of_several_exceptions_is_shown(tmp_path: Path) -> None:
    """Process 2 fails later, but ends earlier: the others end when they are asked to."""
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(me + 5))
with open(f"{run_dir}/error.{me}", "w") as file:
    file.write(f"{100.5 + me}\\nTraceback (most recent call last):\\nfrom {me}\\n")
open(f"up.{me}", "w").close()
if me < 2: time.sleep(3600)
until("up.0")
until("up.1")
sys.exit(7)
"""
    told = launched(tmp_path, script, "--nproc-per-node=3", patch=PATIENT)
    assert told.status == 5
    end = "process 0 failed first: status 5\n[0] Traceback (most recent call last):\n[0] from 0\n"
    assert told.err.endswith(end)


def test_a_killed_process_ends_all(tmp_path: Path) -> None:
    with launching(tmp_path, STUBBORN + SLEEP, "--nproc-per-node=3") as launch:
        pids = launch.pids(3)
        os.kill(pids[2], signal.SIGKILL)
        told = launch.told()
    assert told.status == 128 + signal.SIGKILL
    assert not living(pids)
    assert told.err == "zerojax launch: process 2 failed first: ended by SIGKILL\n"


@pytest.mark.parametrize("which", ["the launcher", "its child"])
def test_nothing_outlives_a_killed_launcher(tmp_path: Path, which: str) -> None:
    with launching(tmp_path, GRANDCHILD + STUBBORN + SLEEP, "--nproc-per-node=2") as launch:
        pids = launch.pids(2) + launch.pids(2, "grandchild")
        parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != launch.process.pid
        os.kill(launch.process.pid if which == "the launcher" else parent, signal.SIGKILL)
        assert launch.told().status in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert not left_behind([parent, *pids])


def stopped(launch: Launch, number: signal.Signals, word: str = "ready") -> None:
    launch.pids(2, word)
    launch.send(number)


def test_sigterm_is_passed_on_and_waited_for(tmp_path: Path) -> None:
    with launching(tmp_path, PREEMPTIBLE, "--nproc-per-node=2", "--max-restarts=3") as launch:
        stopped(launch, signal.SIGTERM)
        told = launch.told()
    assert told.status == 75
    assert told.err == ""


def test_grace_ends(tmp_path: Path) -> None:
    with launching(tmp_path, STUBBORN + SLEEP, "--nproc-per-node=2", "--grace=1") as launch:
        stopped(launch, signal.SIGTERM)
        told = launch.told()
    assert told.status == 128 + signal.SIGKILL
    assert told.seconds >= 1
    late = "process 0, process 1 did not end within 1 s: killed"
    assert told.err == f"zerojax launch: {late}\n"


def test_who_fails_when_asked_to_stop_leaves_the_others_their_grace(tmp_path: Path) -> None:
    script = """
def save(*_):
    time.sleep(4 * me)
    say("saved")
    sys.exit([3, 75][me])
signal.signal(signal.SIGTERM, save)
say("ready", os.getpid())
time.sleep(3600)
"""
    with launching(tmp_path, script, "--nproc-per-node=2") as launch:
        stopped(launch, signal.SIGTERM)
        told = launch.told()
    assert told.status == 3
    assert told.out.count("saved") == 2


def test_ctrl_c_twice_kills(tmp_path: Path) -> None:
    with launching(tmp_path, STUBBORN + SLEEP, "--nproc-per-node=2", patch=PATIENT) as launch:
        stopped(launch, signal.SIGINT)
        launch.pids(2, "interrupted")
        launch.send(signal.SIGINT)
        told = launch.told()
    assert told.status == 128 + signal.SIGINT


def test_restarts_have_a_fresh_port_and_folder(tmp_path: Path) -> None:
    script = """
tries = 0
while os.path.exists(f"{me} tried {tries}"):
    tries += 1
open(f"{me} tried {tries}", "w").close()
if me == 0:
    until(f"1 tried {tries}")
    say("at", run_dir, os.environ["ZEROJAX_COORDINATOR"])
    sys.exit([3, 75, 0][tries])
sys.exit([0, 75, 0][tries])
"""
    told = launched(tmp_path, script, "--nproc-per-node=2", "--max-restarts=5")
    assert told.status == 0, told.err
    at = [line.split()[-2:] for line in told.out.splitlines() if " at " in line]
    assert len({folder for folder, _ in at}) == 3
    assert len({address for _, address in at}) == 3
    lines = [line for line in told.err.splitlines() if "attempt" in line]
    assert lines == [
        "zerojax launch: attempt 2 of 6, because process 0 failed first: status 3",
        "zerojax launch: attempt 3 of 6, because all processes saved and ended: preempted",
    ]


def test_attempts_end() -> None:
    lost, told = Outcome(4, "status 4", again=True), list[int]()

    def attempt() -> Outcome:
        told.append(len(told))
        return lost if len(told) < 4 else Outcome(0, "", again=False)

    assert attempts(attempt, 1) == 4
    assert len(told) == 2
    assert attempts(attempt, 5) == 0
    assert len(told) == 4
    assert attempts(lambda: lost._replace(again=False), 5) == 4


def test_a_script_that_never_joins_is_an_error(tmp_path: Path) -> None:
    script = "os.remove(f'{run_dir}/joined.{me}')"
    told = launched(tmp_path, script, "--nproc-per-node=2", "--max-restarts=3")
    assert told.status == 2
    assert told.err.count("zerojax launch: ") == 1
    assert "script never calls zerojax.init_distributed()" in told.err
    assert launched(tmp_path, script, "--nproc-per-node=1").status == 0


@pytest.mark.parametrize("others", ["time.sleep(3600)", "time.sleep(1); os.abort()"])
def test_a_process_that_leaves_early_with_status_0_is_named(tmp_path: Path, others: str) -> None:
    script = f"os._exit(0) if me == 1 else None; {others}"
    told = launched(tmp_path, script, "--nproc-per-node=3")
    assert told.status == 1, told.err
    assert "process 1 ended first, with status 0, before the end of its script" in told.err
    assert launched(tmp_path, "time.sleep(me); os._exit(0)", "--nproc-per-node=2").status == 0


def test_stacks_of_a_watchdog_are_kept(tmp_path: Path) -> None:
    script = "open(f'{run_dir}/stacks.{me}', 'w').close(); sys.exit(76)"
    told = launched(tmp_path, script, "--nproc-per-node=2", patch=PATIENT)
    assert told.status == 76
    folder = Path(told.err.splitlines()[-1].split(" are in ")[1]).parent
    assert (folder / "stacks.0").exists()


def test_a_terminal_s_ctrl_c_reaches_each_process_once(tmp_path: Path) -> None:
    """And the first process reads what is typed."""
    (tmp_path / "script.py").write_text(
        HEAD
        + """
def interrupted(*_):
    say("interrupted")
    sys.exit(1)
signal.signal(signal.SIGINT, interrupted)
say("typed", input() if me == 0 else "")
time.sleep(3600)
"""
    )
    in_a_terminal = "import os, pty, sys; os._exit(pty.spawn(sys.argv[1:]) >> 8)"
    words = [*command(PATIENT), "--nproc-per-node=2", "script.py"]
    with subprocess.Popen(
        [sys.executable, "-c", in_a_terminal, *words],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    ) as terminal:
        assert terminal.stdin
        assert terminal.stdout
        terminal.stdin.write(b"hello\n")
        said = b""
        while said.count(b"typed") < 2:
            said += terminal.stdout.read(1000)
        terminal.stdin.write(b"\x03")
        while more := terminal.stdout.read(1000):
            said += more
        assert terminal.wait(LIMIT) == 128 + signal.SIGINT
    assert b"[0] typed hello" in said
    assert said.count(b"interrupted") == 2
