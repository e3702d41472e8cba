"""The results of `zerojax plan`, and their JSON form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.cli.options import StepOptions
from zerojax.devices.topology import device_kinds
from zerojax.foresight.choice import Choice, changes
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial
from zerojax.pipeline.schedule import Schedule

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
      gathered: The options that an "auto" for what stays gathered was chosen from; the first is the
        fastest, and the choice. Empty if the config leaves nothing open, or nothing may stay.
    """

    asked: StepOptions
    config: str
    choice: Choice
    forecast: Forecast
    remedies: tuple[Trial, ...] | None = None
    stages: Mapping[str, Forecast] = dataclasses.field(default_factory=dict)
    attention: str | None = None
    gathered: tuple[Trial, ...] = ()

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
    def reserve(self) -> int:
        """Bytes of a device's memory that no step may use."""
        rates = self.forecast.rates
        return rates.memory - rates.room

    @property
    def fraction(self) -> float | None:
        """XLA_PYTHON_CLIENT_MEM_FRACTION for the step; None if JAX's default suffices."""
        forecast = self.forecast
        share = forecast.peak.bytes / forecast.rates.memory
        is_gpu = forecast.rates.kind in device_kinds()["gpu"]
        if not is_gpu or not forecast.fits or share <= PREALLOCATED:
            return None
        return math.ceil(100 * share) / 100


def to_json(planned: Planned) -> dict[str, Any]:
    """Returns every figure of the tables as JSON values, in bytes and seconds, of each device.

    `pipeline` is null without stages, `step` if not every program was compiled, `tokens_per_second`
    in it if the batch has no tokens, and `remedies` if none were searched for. `weighed` has the
    options that an "auto" was chosen from, the fastest first.
    """
    forecast, choice, live = planned.forecast, planned.choice, planned.forecast.plan.live
    links, shares = forecast.rates.links, forecast.rates.reached.shares
    return {
        "model": planned.asked.model,
        "parameters": forecast.parameters,
        "config": planned.config,
        "devices": {"kind": forecast.rates.kind, "count": forecast.devices},
        "mesh": dict(forecast.plan.mesh.shape),
        "rows": planned.rows,
        "seq": planned.asked.seq,
        "attention": planned.attention,
        "choice": dataclasses.asdict(choice),
        "pipeline": _pipeline(planned),
        "fits": forecast.fits,
        "memory": {
            **_memory(forecast),
            "device": forecast.rates.memory,
            "reserve": planned.reserve,
            "program": forecast.peak.name,
            "mem_fraction": planned.fraction,
            "recomputes_above": forecast.recomputes_above,
            "host": forecast.host_bytes,
            "disk": forecast.disk_bytes,
        },
        "stay_gathered": {
            "parameters": len(live.leaves),
            "elements": live.elements,
            "bytes": live.bytes,
            "saved": live.saved,
            "weighed": [
                {
                    "elements": each.choice.live,
                    "bytes": each.forecast.plan.live.bytes,
                    "taken": each.choice == choice,
                    **_memory(each.forecast),
                    "step": _step(each.forecast),
                }
                for each in planned.gathered
            ],
        },
        "programs": [
            {
                "name": each.name,
                "memory": dict(each.memory),
                "bytes": each.bytes,
                "host": each.host,
                "times": each.times,
                "seconds": each.seconds,
                "computed_again": each.again.instructions,
                "bytes_again": each.again.bytes,
                "seconds_again": each.again.seconds,
                "compile_seconds": each.compile.seconds,
            }
            for each in forecast.programs
        ],
        "links": {
            "inside": {"name": links.name, "speed": links.inside},
            "between": {"name": "network", "speed": links.between},
        },
        "traffic": [
            dataclasses.asdict(each) | {"hidden": each.hidden} for each in forecast.traffic
        ],
        "step": _step(forecast) if forecast.is_complete else None,
        "assumed": {f"{name}_share": share for name, share in shares.items()},
        "compile_seconds": forecast.compile_seconds,
        "remedies": None
        if planned.remedies is None
        else [
            {
                "set": list(changes(choice, each.choice)),
                "choice": dataclasses.asdict(each.choice),
                **_memory(each.forecast),
                "host": each.forecast.host_bytes,
                "disk": each.forecast.disk_bytes,
                "step": _step(each.forecast),
            }
            for each in planned.remedies
        ],
        "stages": {name: _memory(each) for name, each in planned.stages.items()},
    }


def _memory(forecast: Forecast) -> dict[str, object]:
    peak = forecast.peak
    return {"kinds": dict(peak.memory), "peak": peak.bytes, "headroom": forecast.headroom}


def _pipeline(planned: Planned) -> dict[str, object] | None:
    if (schedule := planned.schedule) is None:
        return None
    return {
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "ticks": schedule.ticks,
        "bubble": schedule.bubble,
        "boundary": planned.forecast.boundary,
    }


def _step(forecast: Forecast) -> dict[str, float | None]:
    return {
        "seconds": forecast.seconds,
        "tokens": forecast.tokens,
        "tokens_per_second": forecast.tokens_per_second if forecast.tokens else None,
        "mfu": forecast.mfu,
    }
