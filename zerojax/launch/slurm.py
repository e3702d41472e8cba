"""Slurm: a batch script whose ``srun`` starts the processes, and which requeues itself."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping

from zerojax.launch.error import UsageError
from zerojax.launch.job import TOKEN, Job, passed_on
from zerojax.launch.local import defaults

# A SIGTERM to srun kills the tasks; scancel sends SIGTERM only to the tasks, and they save. After
# the first task has left with 75, --kill-on-bad-exit would kill the others; --wait lets them leave.
_BODY = """\
attempt() {{
    srun --kill-on-bad-exit=0 --wait=5 {output} {command} &
    step=$!
    wait $step; status=$?
    if [ -n "$asked" ]; then wait $step; status=$?; fi  # the trap ended the first
}}

preempted() {{
    trap "" TERM
    asked=yes
    echo "zerojax launch: SIGTERM, passed to all processes"
    scancel --signal=TERM "$SLURM_JOB_ID"
}}

asked= restarts=0
trap preempted TERM
while :; do
{logs}    attempt
    if [ $status = 75 ] || [ $status = 0 ] || [ -n "$asked" ] || [ $restarts = {restarts} ]; then
        break
    fi
    restarts=$((restarts + 1))
    echo "zerojax launch: attempt $((restarts + 1)) of {attempts}, because of status $status"
done
# A cancelled job gets SIGTERM too, and its tasks save: Slurm calls the job COMPLETING then.
if [ $status = 75 ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
    echo "zerojax launch: all processes saved; job $SLURM_JOB_ID is queued again"
    scontrol requeue "$SLURM_JOB_ID" && sleep 60
fi
exit $status
"""


def batch_script(job: Job, nodes: int, tasks: int, options: str, environ: Mapping[str, str]) -> str:
    """Returns the batch script for ``sbatch``.

    Slurm sends SIGTERM to the batch shell ``job.grace`` seconds before the time limit. The shell
    passes the signal to all tasks; when they have saved and ended with status 75, the job is queued
    again. Other failures start the tasks again in the same allocation, ``job.max_restarts`` times.

    Args:
      job: The job to start.
      nodes: Number of nodes.
      tasks: Processes on each node, and as many GPUs; CPU processes under ``JAX_PLATFORMS=cpu``.
      options: Further options of sbatch, as ``--partition=gpu --time=4:00:00``; they come last and
        override the others.
      environ: Environment whose variables for JAX the tasks receive.

    Raises:
      UsageError: The options cannot be parsed, or would not stay in their line of the script.
    """
    try:
        user_options = shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--slurm {options!r}: {error}") from None
    if odd := [word for word in (options, _name(job), str(job.log_dir)) if not word.isprintable()]:
        raise UsageError(f"{odd[0]!r} has an unprintable character, such as a newline: remove it")
    misplaced = [word for word in user_options if not word.startswith("-")]
    if misplaced:
        raise UsageError(f"--slurm: {misplaced[0]!r} is no option: write --name=value")
    on_gpus = environ.get("JAX_PLATFORMS") != "cpu"
    lines = [f"--job-name={_name(job)}", f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    if on_gpus and not any(word.startswith(("--gpus", "--gres", "-G")) for word in user_options):
        lines.append(f"--gpus-per-node={tasks}")
    lines += ["--requeue", "--open-mode=append", f"--signal=B:TERM@{max(1, math.ceil(job.grace))}"]
    output, logs = "--label", ""
    if job.log_dir is not None:
        folder = job.log_dir.absolute()
        lines.append(f"--output={folder}/slurm-%j.log")
        run_name = "run-${SLURM_RESTART_COUNT:-0}.$restarts"
        output = '--output="$logs/%t.log"'
        logs = (
            f'    logs={shlex.quote(str(folder))}/{run_name}; mkdir -p "$logs"\n'
            "    export ZEROJAX_RUN_DIR=$logs  # errors, and the stacks that the watchdog writes\n"
        )
    exports = defaults(environ, on_gpus) | passed_on(environ)
    if job.watchdog is not None:
        exports["ZEROJAX_WATCHDOG"] = job.watchdog
    parts = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(line)}" for line in [*lines, *user_options])]
    secret = "$(od -An -N16 -tx8 /dev/urandom | tr -d ' \\n')"
    parts.append(f"export {TOKEN}=${{{TOKEN}:-{secret}}}")
    parts += [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    # Since Slurm 22.05 srun does not inherit sbatch's --cpus-per-task.
    cpus = "SLURM_CPUS_PER_TASK"
    parts.append(f'[ -z "${cpus}" ] || export SRUN_CPUS_PER_TASK=${cpus}')
    body = _BODY.format(
        output=output,
        command=shlex.join(job.command),
        logs=logs,
        restarts=job.max_restarts,
        attempts=job.max_restarts + 1,
    )
    return "\n".join([*parts, "", body])


def submit(script: str, environ: Mapping[str, str]) -> int:
    """Submits a batch script by ``sbatch``, which prints the job's number; returns its exit status.

    Args:
      script: A script from ``batch_script``.
      environ: The environment, of which sbatch passes to the job what the cluster allows.

    Raises:
      UsageError: sbatch is not installed on this machine.
    """
    if shutil.which("sbatch", path=environ.get("PATH")) is None:
        raise UsageError("--slurm: no sbatch here: run this on a login node, or with --dry-run")
    completed = subprocess.run(["sbatch"], input=script, text=True, check=False, env=dict(environ))
    return completed.returncode


def _name(job: Job) -> str:
    return os.path.basename(job.script[1] if job.script[0] == "-m" else job.script[0])
