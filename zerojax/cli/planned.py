"""What `python -m zerojax plan` found out, and the same as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerojax.devices.topology import device_kinds
from zerojax.foresight.choice import Choice, changes
from zerojax.foresight.forecast import Forecast
from zerojax.foresight.trials import Trial

PREALLOCATED = 0.75
"""The share of a GPU's memory that JAX takes when it starts, unless it is told otherwise."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """The forecast of a step, and what was asked for.

    Attributes:
      model, config: as they were given.
      seq: tokens in a row.
      choice: what the config chooses.
      forecast: of that.
      remedies: choices that fit; None where none were looked for.
      stages: forecasts of the same batch by what they are of; empty where there are none.
    """

    model: str
    config: str
    seq: int
    choice: Choice
    forecast: Forecast
    remedies: tuple[Trial, ...] | None = None
    stages: Mapping[str, Forecast] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of an update, over all devices."""
        return self.choice.micro * self.choice.accumulation * self.forecast.devices

    @property
    def reserve(self) -> int:
        """Bytes of a device's memory that no step gets."""
        found = self.forecast
        return found.rates.memory - found.rates.room

    @property
    def fraction(self) -> float | None:
        """What XLA_PYTHON_CLIENT_MEM_FRACTION has to be; None where JAX's own will do."""
        found = self.forecast
        share = found.peak.bytes / found.rates.memory
        gpu = found.rates.kind in device_kinds()["gpu"]
        if not gpu or not found.fits or share <= PREALLOCATED:
            return None
        return math.ceil(100 * share) / 100


def to_json(planned: Planned) -> dict[str, Any]:
    """Every figure of the tables, for programs: bytes and seconds, of each device.

    `step` is null where not every program was compiled, `tokens_per_second` in it where the batch
    has no tokens, and `remedies` where none were looked for.
    """
    found, choice = planned.forecast, planned.choice
    shares = ("matrix_share", "memory_share", "link_share", "host_share")
    return {
        "model": planned.model,
        "parameters": found.parameters,
        "config": planned.config,
        "devices": {"kind": found.rates.kind, "count": found.devices},
        "rows": planned.rows,
        "seq": planned.seq,
        "choice": dataclasses.asdict(choice),
        "fits": found.fits,
        "memory": {
            **_memory(found),
            "device": found.rates.memory,
            "reserve": planned.reserve,
            "program": found.peak.name,
            "mem_fraction": planned.fraction,
            "host": found.host_bytes,
            "disk": found.disk_bytes,
        },
        "programs": [
            {
                "name": each.name,
                "memory": dict(each.memory),
                "bytes": each.bytes,
                "host": each.host,
                "times": each.times,
                "seconds": each.seconds,
                "compile_seconds": each.compile_seconds,
            }
            for each in found.programs
        ],
        "traffic": [dataclasses.asdict(each) | {"hidden": each.hidden} for each in found.traffic],
        "step": _step(found) if found.whole else None,
        "assumed": {name: getattr(found.rates, name) for name in shares},
        "compile_seconds": found.compile_seconds,
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


def _memory(found: Forecast) -> dict[str, Any]:
    peak = found.peak
    return {"kinds": dict(peak.memory), "peak": peak.bytes, "headroom": found.headroom}


def _step(found: Forecast) -> dict[str, float | None]:
    return {
        "seconds": found.seconds,
        "tokens": found.tokens,
        "tokens_per_second": found.tokens_per_second if found.tokens else None,
        "mfu": found.mfu,
    }
