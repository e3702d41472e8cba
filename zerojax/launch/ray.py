"""Ray Train: workers that Ray places; each runs the script in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.distributed.ray_train import ray_train_variables
from zerojax.launch import descent
from zerojax.launch.error import UsageError
from zerojax.launch.failure import say
from zerojax.launch.job import TOKEN, Job, passed_on, with_token
from zerojax.launch.local import defaults


class ScriptError(Exception):
    """Error for a script that did not end with status 0.

    Attributes:
      status: Exit status of the script, as a shell reports it.
    """

    process: int
    status: int

    def __init__(self, process: int, status: int) -> None:
        super().__init__(process, status)
        self.process, self.status = process, status

    def __str__(self) -> str:
        return f"process {self.process}: status {self.status}"


def run(job: Job, workers: int, environ: Mapping[str, str]) -> int:
    """Runs a job by Ray Train's JaxTrainer; returns the exit status.

    Ray restarts all workers after a failure, ``job.max_restarts`` times. Ray's backend for JAX is
    configured to do nothing: the script joins by ``zerojax.init_distributed``, in a separate
    process, because Ray calls training functions in a thread, where Python takes no signals.

    Args:
      job: The job to start, in this folder, which all machines share.
      workers: Number of workers, with a GPU each; CPU workers under ``JAX_PLATFORMS=cpu``.
      environ: Environment of the launcher, and of the workers if Ray starts on this machine.

    Raises:
      UsageError: Ray is not installed.
    """
    launcher_environ = dict(environ)
    os.environ.clear()  # if Ray starts here, its workers inherit this environment
    os.environ.update(launcher_environ)
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # keep equal lines of several processes
    try:
        from ray import train
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.train.v2.jax import JaxTrainer
        from ray.train.v2.jax.config import JaxConfig
    except ImportError as error:
        raise UsageError(f"--ray needs Ray: pip install -e '.[ray]' ({error})") from None
    on_gpus = environ.get("JAX_PLATFORMS") != "cpu"
    variables = defaults(environ, on_gpus) | passed_on(environ)
    variables[TOKEN] = with_token(environ)[TOKEN]
    if job.watchdog is not None:
        variables["ZEROJAX_WATCHDOG"] = job.watchdog
    trainer = JaxTrainer(
        _worker,
        train_loop_config={
            "command": job.command,
            "environ": variables,
            "folder": str(Path.cwd()),
            "logs": str(job.log_dir.absolute()) if job.log_dir else None,
        },
        jax_config=JaxConfig(),  # without GPUs or TPUs the backend does not set up JAX
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=on_gpus),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=job.max_restarts)
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        failures = getattr(error, "worker_failures", {})
        statuses = [status for failure in failures.values() if (status := _status(failure))]
        say(
            "\n".join(str(error).splitlines()[:1] + [str(failure) for failure in failures.values()])
        )
        return statuses[0] if statuses else 1
    return 0


def _status(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, ScriptError):
            return error.status
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _worker(config: dict[str, Any]) -> None:
    """Runs the script in a process with this worker's index."""
    from ray import train

    me = train.get_context().get_world_rank()
    environ = {**os.environ, **config["environ"], **ray_train_variables()}
    parent = os.getpid()
    log = None
    if config["logs"]:
        Path(config["logs"]).mkdir(parents=True, exist_ok=True)
        environ["ZEROJAX_RUN_DIR"] = config["logs"]
        log = open(Path(config["logs"]) / f"{me}.log", "ab")  # noqa: SIM115
    script = subprocess.Popen(
        config["command"],
        env=environ,
        cwd=config["folder"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: descent.die_with(parent, 9),
    )
    assert script.stdout is not None
    for line in script.stdout:  # Ray shows what a worker prints, without its rank
        sys.stdout.write(f"[{me}] {line.decode(errors='replace')}")
        sys.stdout.flush()
        if log is not None:
            log.write(line)
            log.flush()
    if status := descent.shell_status(script.wait()):
        raise ScriptError(me, status)
