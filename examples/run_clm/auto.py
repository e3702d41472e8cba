"""The settings that a config leaves to the devices, by `zerojax.fit`."""

import functools
import pathlib
from typing import Any

import hjson
from jax.sharding import Mesh
from rich.console import Console

import zerojax
from examples.run_clm.data import Text
from examples.run_clm.devices import row_devices
from examples.run_clm.job import BATCH, OFFLOAD, Job
from examples.run_clm.workload import specs_on, workload


def steps_of(job: Job, text: Text, mesh: Mesh) -> int:
    """Updates of the run; those of an epoch follow from the config's rows."""
    rows = rows_of(job, mesh) if job.num_train_epochs else 0
    return job.steps(text, rows)


def rows_of(job: Job, mesh: Mesh) -> int:
    """Rows of an update, whatever the stage and the offload."""
    settings = left_open(job.config)
    if settings is None:
        config = zerojax.zero(job.config, mesh=mesh, auto=job.auto(1)).config
    else:
        batch = {key: settings[key] for key in BATCH if settings.get(key, "auto") != "auto"}
        config = zerojax.zero(batch, mesh=mesh).config
    return job.rows(config, row_devices(mesh))


def resolved(job: Job, mesh: Mesh, steps: int, console: Console) -> zerojax.Zero:
    """The job's config on a mesh, for a run of `steps`.

    A stage or an offload section that is "auto" is chosen for these devices, with the micro-batch.
    The rows of an update stay as they are without "auto", and so do the numbers.

    Raises:
      ValueError: zerojax knows neither speed nor memory of such devices, or the rows do not divide.
      zerojax.ConfigError: the config is wrong.
    """
    if left_open(job.config) is None:
        return zerojax.zero(job.config, mesh=mesh, auto=job.auto(steps), specs=specs_on(mesh))
    fitted = zerojax.fit(
        job.config,
        functools.partial(workload, job),
        train_batch_size=rows_of(job, mesh),
        seq=job.block_size,
        mesh=mesh,
        auto=job.auto(steps),
    )
    console.print(f'For "auto" in {job.config}, the fastest that fits: {fitted.choice}')
    return zerojax.zero(fitted.config, mesh=mesh, specs=specs_on(mesh))


def left_open(config: pathlib.Path) -> dict[str, Any] | None:
    """A JSON's settings where its stage or an offload section is "auto"; else None, also for a
    file that holds no config, of which `zerojax.zero` says more."""
    try:
        settings = hjson.loads(config.read_text())
        section = settings["zero_optimization"]
        values = [section.get(key) for key in ("stage", *OFFLOAD)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return settings if "auto" in values else None
