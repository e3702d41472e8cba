"""Ray Train: workers that Ray places, each of which runs the script in a process."""

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


class Ended(Exception):
    """A script that did not end with status 0.

    Attributes:
      status: Its exit status, as a shell reports it.
    """

    def __init__(self, process: int, status: int) -> None:
        super().__init__(process, status)
        self.process, self.status = process, status

    def __str__(self) -> str:
        return f"process {self.process}: status {self.status}"


def run(job: Job, workers: int, environ: Mapping[str, str]) -> int:
    """Run a job by Ray Train's JaxTrainer; the exit status.

    Ray restarts all workers after a failure, ``job.max_restarts`` times. Its backend for JAX is
    told to do nothing: the script joins by ``zerojax.init_distributed``, in a process of its own,
    because Ray calls training functions in a thread, where Python takes no signals.

    Args:
      job: What to start, in this folder, which all machines share.
      workers: How many, with a GPU each; CPU workers under ``JAX_PLATFORMS=cpu``.
      environ: That of the workers too, where Ray starts here.

    Raises:
      UsageError: Ray is not installed.
    """
    given = dict(environ)
    os.environ.clear()  # workers of a Ray that starts here inherit this environment
    os.environ.update(given)
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # which takes processes' equal lines for one
    try:
        from ray import train
        from ray.train.v2.api.exceptions import TrainingFailedError
        from ray.train.v2.jax import JaxTrainer
        from ray.train.v2.jax.config import JaxConfig
    except ImportError as error:
        raise UsageError(f"--ray needs Ray: pip install -e '.[ray]' ({error})") from None
    on_gpus = environ.get("JAX_PLATFORMS") != "cpu"
    told = defaults(environ, on_gpus) | passed_on(environ)
    told[TOKEN] = with_token(environ)[TOKEN]
    if job.watchdog is not None:
        told["ZEROJAX_WATCHDOG"] = job.watchdog
    trainer = JaxTrainer(
        _worker,
        train_loop_config={
            "command": job.command,
            "environ": told,
            "folder": str(Path.cwd()),
            "logs": str(job.log_dir.absolute()) if job.log_dir else None,
        },
        jax_config=JaxConfig(),  # neither GPUs nor TPUs: the backend leaves JAX alone
        scaling_config=train.ScalingConfig(num_workers=workers, use_gpu=on_gpus),
        run_config=train.RunConfig(
            failure_config=train.FailureConfig(max_failures=job.max_restarts)
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        failures = getattr(error, "worker_failures", {})
        statuses = [status for each in failures.values() if (status := _status(each))]
        say("\n".join(str(error).splitlines()[:1] + [str(each) for each in failures.values()]))
        return statuses[0] if statuses else 1
    return 0


def _status(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, Ended):
            return error.status
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _worker(config: dict[str, Any]) -> None:
    """Run the script as the process that this worker stands for."""
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
        raise Ended(me, status)
