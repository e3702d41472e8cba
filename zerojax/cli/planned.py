"""The results of `zerojax plan`, and their figures by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from zerojax.cli.options import StepOptions
from zerojax.devices.topology import device_kinds
from zerojax.foresight.choice import Choice, changes
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial
from zerojax.pipeline.schedule import Schedule

SPACE = (
    "fits", "is_complete", "headroom", "recomputes_above", "host_bytes", "disk_bytes",
    "compile_seconds",
)  # fmt: skip
"""The properties of a forecast that are figures of memory, or of its compiles."""

TIME = ("seconds", "tokens", "tokens_per_second", "mfu", "bytes_again", "seconds_again", "boundary")
"""The properties that are figures of time and traffic."""

PIPELINE = ("stages", "micro_batches", "ticks", "bubble")
"""The properties of a schedule of pipeline stages that are figures."""

PREALLOCATED = 0.75
"""The share of a GPU's memory that JAX preallocates by default."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """The forecast of a step, and the request for it.

    Attributes:
      asked: The options of the command.
      config: The config's path, as given.
      choice: The settings that the config chooses.
      forecast: The forecast of these settings.
      remedies: Choices that fit; None if none were searched for.
      stages: Forecasts of the same batch by stage and offload; empty without a picture.
      attention: The implementation in the plan; None for a model that has its own.
    """

    asked: StepOptions
    config: str
    choice: Choice
    forecast: Forecast
    remedies: tuple[Trial, ...] | None = None
    stages: Mapping[str, Forecast] = dataclasses.field(default_factory=dict)
    attention: str | None = None

    @property
    def rows(self) -> int:
        """Rows of an update, over all devices."""
        return self.choice.micro * self.choice.accumulation * self.forecast.row_devices

    @property
    def schedule(self) -> Schedule | None:
        """The order in which pipeline stages run micro-batches; None without stages."""
        plan = self.forecast.plan
        return Schedule.of(plan.mesh, self.choice.accumulation)

    @property
    def fraction(self) -> float | None:
        """XLA_PYTHON_CLIENT_MEM_FRACTION for the step; None if JAX's default suffices."""
        forecast = self.forecast
        share = forecast.peak.bytes / forecast.rates.memory
        is_gpu = forecast.rates.kind in device_kinds()["gpu"]
        if not is_gpu or not forecast.fits or share <= PREALLOCATED:
            return None
        return math.ceil(100 * share) / 100


def values(planned: Planned) -> dict[str, object]:
    """Returns every figure of the tables by name, in bytes and seconds, of each device."""
    forecast, schedule, remedies = planned.forecast, planned.schedule, planned.remedies
    return {
        "model": planned.asked.model,
        "config": planned.config,
        "devices": forecast.devices,
        "mesh": forecast.plan.mesh.shape,
        "rows": planned.rows,
        "seq": planned.asked.seq,
        "attention": planned.attention,
        "pipeline": schedule and {name: getattr(schedule, name) for name in PIPELINE},
        "parameters": forecast.parameters,
        **figures(Trial(planned.choice, forecast)),
        "reserve": forecast.rates.memory - forecast.rates.room,
        "mem_fraction": planned.fraction,
        "programs": forecast.programs,
        "traffic": forecast.traffic,
        "rates": forecast.rates,
        "remedies": None
        if remedies is None
        else [{"set": [*changes(planned.choice, x.choice)], **figures(x)} for x in remedies],
        "stages": {name: each.peak.memory for name, each in planned.stages.items()},
    }


def figures(trial: Trial) -> dict[str, object]:
    """Returns the figures of a choice by name; of time none unless every program was compiled."""
    forecast = trial.forecast
    names = (*SPACE, *TIME) if forecast.is_complete else SPACE
    live = {name: getattr(forecast.plan.live, name) for name in ("elements", "bytes", "saved")}
    return {
        "choice": trial.choice,
        **{name: getattr(forecast, name) for name in names},
        "peak": forecast.peak.bytes,
        "program": forecast.peak.name,
        "memory": forecast.peak.memory,
        "stay_gathered": live,
    }
