"""Several machines through Open MPI's ``mpirun``: one supervisor on each; all end together."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from zerojax.launch.failure import Outcome
from zerojax.launch.group import Group, Process
from zerojax.launch.hosts import Host
from zerojax.launch.job import PART, TOKEN, Job, Node, node_command, with_token
from zerojax.launch.local import attempts, new_attempt

# Seconds that mpirun needs after the supervisors' grace has passed.
_SLACK_SECONDS = 5.0

# Seconds that define when mpirun's daemons end if the network cuts them off; by default 480.
_KEEPALIVE = {"time": "10", "intvl": "5", "probes": "4"}


def installed() -> str | None:
    """Returns the path of mpirun, or None."""
    return shutil.which("mpirun")


def mpirun_command(hosts: list[Host], commands: list[list[str]], *options: str) -> list[str]:
    """Returns mpirun's command for one process on each host, with ``options`` for each.

    Without ``--bind-to none`` Open MPI ties a supervisor, and all that it starts, to one core.
    """
    command = ["mpirun", "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    for name, seconds in _KEEPALIVE.items():
        command += ["--mca", f"oob_tcp_keepalive_{name}", seconds]
    for host, host_command in zip(hosts, commands, strict=True):
        command += [
            "-np",
            "1",
            "--host",
            host.name,
            "--wdir",
            str(Path.cwd()),
            *options,
            *host_command,
            ":",
        ]
    return command[:-1]


def run(
    job: Job, hosts: list[Host], nodes: Callable[[], list[Node]], environ: Mapping[str, str]
) -> int:
    """Starts a job on several machines, restarts it if allowed, and returns the exit status.

    Args:
      job: The job to start.
      hosts: The machines.
      nodes: Returns the machines' parts, with a fresh port at each call.
      environ: The environment of mpirun, some of whose variables the machines receive.
    """

    def attempt() -> Outcome:
        logs = job.log_dir and new_attempt(job.log_dir)
        part = job._replace(log_dir=logs)
        node_environ = {**environ, PART: "1"}
        commands = [node_command(part, node, node_environ) for node in nodes()]
        command = mpirun_command(hosts, commands, "-x", TOKEN)
        process = Process(None, command, {})
        # mpirun kills on SIGTERM, but forwards SIGUSR1.
        grace = job.grace + _SLACK_SECONDS
        outcome = Group([process], with_token(environ), grace, stop=signal.SIGUSR1).run()
        outcome.show()
        return outcome

    return attempts(attempt, job.max_restarts)
