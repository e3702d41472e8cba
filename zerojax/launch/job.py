"""The job to launch, and the commands that start it on other machines."""

from __future__ import annotations

import os
import random
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from zerojax.launch.error import UsageError

# Set for the launchers, one on each machine, that another launcher has started.
PART = "ZEROJAX_LAUNCH_PART"

# A secret that the processes of a run share, so that no other process joins them.
TOKEN = "ZEROJAX_TOKEN"

# Variables that users set for JAX, and that a host reached by ssh does not inherit.
_PASSED_ON = (
    *("JAX_", "XLA_", "TF_CPP_", "NCCL_", "CUDA_DEVICE_ORDER", "PYTHON", "LD_LIBRARY_PATH"),
    PART,
)


class Job(NamedTuple):
    """A script to run in several processes.

    Attributes:
      script: ``train.py --lr 3``, or ``-m module --lr 3``.
      grace: Seconds from SIGTERM to SIGKILL.
      max_restarts: The most times that a failed group is started again.
      watchdog: Seconds without a step until a process ends the group, or "off"; None: the default.
      log_dir: Folder for the output of each process; None: the output is not kept.
    """

    script: tuple[str, ...]
    grace: float = 60.0
    max_restarts: int = 0
    watchdog: str | None = None
    log_dir: Path | None = None

    @property
    def command(self) -> list[str]:
        """The command of a process."""
        return [sys.executable, "-m", "zerojax.launch.script", *self.script]


class Node(NamedTuple):
    """The part of a job that one machine runs.

    Attributes:
      rank: Index of the machine.
      counts: Number of processes on each machine.
      coordinator: ``HOST:PORT`` of the first machine; None: any free port of this machine.
      gpus: Names for ``CUDA_VISIBLE_DEVICES``; None: the GPUs that the machine has.
    """

    rank: int
    counts: tuple[int, ...]
    coordinator: str | None
    gpus: tuple[str, ...] | None = None


def checked_script(script: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the script unchanged, after a check.

    Raises:
      UsageError: The file or module does not exist.
    """
    if script[0] == "-m":
        top = script[1].partition(".")[0]
        if PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            raise UsageError(f"no module {top!r} here or installed: check the name")
    elif not os.path.isfile(script[0]):  # Path.is_file raises for names that are too long
        where = f" in {Path.cwd()}" * (not script[0].startswith("/"))
        raise UsageError(f"no script {script[0][:200] or repr('')}{where}: check the path")
    return script


def node_command(job: Job, node: Node, environ: Mapping[str, str]) -> list[str]:
    """Returns the command that starts one machine's part of a job on it, in the same folder."""
    passed = passed_on(environ)
    if node.gpus is not None:
        passed["CUDA_VISIBLE_DEVICES"] = ",".join(node.gpus)
    options = supervisor_options(job, str(node.rank), node.counts, str(node.coordinator))
    settings = ["env", *(f"{name}={value}" for name, value in passed.items())] if passed else []
    return [*settings, sys.executable, "-m", "zerojax", "launch", *options, *job.script]


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that processes on other machines receive from this environment."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_PASSED_ON)}


def supervisor_options(job: Job, rank: str, counts: tuple[int, ...], coordinator: str) -> list[str]:
    """Returns the options of the launcher that starts one machine's part of a job."""
    options = ["--num-nodes", str(len(counts)), "--node-rank", rank]
    options += ["--nproc-per-node", ",".join(map(str, counts))]
    options += ["--coordinator", coordinator, "--grace", f"{job.grace:g}"]
    if job.watchdog is not None:
        options += ["--watchdog", job.watchdog]
    if job.log_dir is not None:
        options += ["--log-dir", str(job.log_dir.absolute())]
    return options


def with_token(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment, with a token of the run unless the user has set a token."""
    return {TOKEN: secrets.token_hex(16), **environ}


def by_hand(command: list[str]) -> str:
    """Formats a command of ``node_command`` for the shell of another machine."""
    return f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(command)}"


def free_port() -> int:
    """Returns a free port of this machine, below the range for outgoing connections."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise UsageError("no port of 100 from 20000 to 32000 is free: pass --coordinator HOST:PORT")
