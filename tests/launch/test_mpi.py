"""Several machines by mpirun: the names of this one, and two namespaces that are two hosts."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from groups import LIMIT
from launch.launched import launching, left_behind, living

from zerojax.launch.descent import descendants
from zerojax.launch.hosts import Host
from zerojax.launch.mpi import mpirun_command

needs_mpirun = pytest.mark.skipif(not shutil.which("mpirun"), reason="mpirun is not installed")
needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="network namespaces need root and iproute2",
)
TWO_HOSTS = Path(__file__).parents[2] / "benchmarks/two_hosts.sh"
ON_ZJA: dict[str, Any] = {
    "on": (TWO_HOSTS, "on", "zja"),
    "OMPI_MCA_plm_rsh_agent": str(TWO_HOSTS),
}


def test_one_program_of_one_process_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    hosts = [Host("a", (0,)), Host("b", (0,))]
    here = str(Path.cwd())
    command = mpirun_command(hosts, [["x", "1"], ["x", "2"]])
    assert command[:4] == ["mpirun", "--bind-to", "none", "--oversubscribe"]
    assert command[command.index("-np") :] == [
        *("-np", "1", "--host", "a", "--wdir", here, "x", "1", ":"),
        *("-np", "1", "--host", "b", "--wdir", here, "x", "2"),
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in mpirun_command(hosts, [["x"], ["x"]])


def names_of_this_machine(folder: Path) -> Path:
    """A hostfile of two machines that are both this one."""
    hosts = folder / "hosts"
    hosts.write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    return hosts


@pytest.mark.slow
@needs_mpirun
def test_processes_of_all_hosts_are_one_job(tmp_path: Path) -> None:
    hosts = names_of_this_machine(tmp_path)
    script = "say(*(os.environ['ZEROJAX_' + x] for x in ('NUM_PROCESSES', 'LOCAL_PROCESSES')))"
    with launching(tmp_path, script, "--hostfile", hosts, "--log-dir=logs") as launch:
        told = launch.told()
    assert told.status == 0, told.err
    said = sorted(line for line in told.out.splitlines() if "pid" not in line)
    assert said == ["[0] 3 2", "[1] 3 2", "[2] 3 1"]
    logs = {path.name for path in (tmp_path / "logs/attempt-1").glob("*.log")}
    assert logs == {"0.log", "1.log", "2.log"}


@pytest.mark.slow
@needs_mpirun
def test_the_earliest_failure_of_all_hosts_is_shown_and_all_start_again(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
lost = "lost at " + os.environ["ZEROJAX_COORDINATOR"].rpartition(":")[2]  # one an attempt
if me == 2:
    open("written", "w").write(str(os.getpid()))
    os.rename("written", lost)
else:
    until(lost)
    while os.path.exists(f"/proc/{open(lost).read()}"):
        time.sleep(0.02)
raise ValueError(f"lost {me}")
"""
    hosts = names_of_this_machine(tmp_path)
    with launching(tmp_path, script, "--hostfile", hosts, "--max-restarts=1") as launch:
        told = launch.told()
    assert told.status == 1
    ours = re.findall("^zerojax launch: (.*)$", told.err, re.MULTILINE)
    why = "process 2 failed first: status 1"
    assert ours == [why, f"attempt 2 of 2, because {why}", why]
    assert told.err.endswith("[2] ValueError: lost 2\n")


@pytest.mark.slow
@needs_mpirun
def test_sigterm_lets_all_hosts_save(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), say("saved"), sys.exit(75)))
say("ready", os.getpid())
time.sleep(3600)
"""
    hosts = names_of_this_machine(tmp_path)
    with launching(tmp_path, script, "--hostfile", hosts, "--max-restarts=1") as launch:
        launch.pids(3, "ready")
        launch.send(signal.SIGTERM)
        told = launch.told()
    assert told.status == 75, told.err
    assert told.out.count("saved") == 3


def two_hosts(*words: str) -> None:
    subprocess.run([TWO_HOSTS, *words], check=True)


@pytest.fixture
def hostfile(tmp_path: Path) -> Iterator[Path]:
    """Two machines, zja and zjb, with two slots each."""
    two_hosts("down")
    two_hosts("up")
    (tmp_path / "hosts").write_text("zja slots=2\nzjb slots=2\n")
    yield tmp_path / "hosts"
    two_hosts("down")


@pytest.mark.sweep
@needs_mpirun
@needs_namespaces
@pytest.mark.parametrize("who", ["a process of zjb", "mpirun"])
def test_two_hosts_end_together(tmp_path: Path, hostfile: Path, who: str) -> None:
    script = "subprocess.Popen(['sleep', '3600'], start_new_session=True)\ntime.sleep(3600)"
    before = {*descendants()}  # of other tests, multiprocessing's own
    with launching(tmp_path, script, "--hostfile", hostfile, **ON_ZJA) as launch:
        workers = launch.pids(4)
        ours = {*descendants()} - before
        mpirun = next(p for p in ours if Path(f"/proc/{p}/comm").read_text() == "mpirun\n")
        victims = {"a process of zjb": workers[3], "the launcher": launch.process.pid}
        os.kill(victims.get(who, mpirun), signal.SIGKILL)
        told = launch.told()
        assert told.status in (128 + signal.SIGKILL, -signal.SIGKILL)
        assert not left_behind([*ours, *workers])
    if who == "a process of zjb":
        assert told.err.endswith("zerojax launch: process 3 failed first: ended by SIGKILL\n")


@pytest.mark.sweep
@needs_mpirun
@needs_namespaces
def test_a_host_that_is_cut_off_holds_up_nobody(tmp_path: Path, hostfile: Path) -> None:
    """What runs on zjb descends from an "sshd" there, and ends as well."""
    line, ssh = tmp_path / "line", tmp_path / "ssh"
    os.mkfifo(line)
    ssh.write_text(
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
        f'echo "${{*:2}}" > {line}\nexec sleep 3600\n'
    )
    ssh.chmod(0o755)
    command = f'read -r line < {line}; exec {TWO_HOSTS} on zjb bash -c "$line"'
    sshd = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL)
    on_zja = ON_ZJA | {"OMPI_MCA_plm_rsh_agent": str(ssh)}
    with launching(tmp_path, "time.sleep(3600)", "--hostfile", hostfile, **on_zja) as launch:
        workers = launch.pids(4)
        there = subprocess.check_output(["ip", "netns", "pids", "zjb"], text=True).split()
        subprocess.run(["ip", "-n", "zjb", "link", "set", "eth0", "down"], check=True)
        os.kill(workers[1], signal.SIGKILL)
        told = launch.told()
    assert told.status == 128 + signal.SIGKILL
    assert told.err.endswith("zerojax launch: process 1 failed first: ended by SIGKILL\n")
    assert not living(workers[:2])
    assert len(there) >= 5  # the daemon, the launcher twice, two processes
    assert not left_behind([*map(int, there)])
    sshd.wait(LIMIT)
