"""Rows of a published table: the published figure, the computed one, and why they differ."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from zerojax.api import zero
from zerojax.devices.topology import topology
from zerojax.foresight.attribution import GATHERED, GRADIENTS, PARAMETERS, STATE
from zerojax.foresight.devices import parse_devices
from zerojax.foresight.forecast import Forecast
from zerojax.tuning.study import Study

GIGA = 1e9
HEADINGS = ["case", "published", "computed", "of each device", "why"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Model, devices and settings of a study.

    Attributes:
      function: returns the model or the workload.
      devices: kind and number, as ``zerojax plan`` takes them.
      seq: tokens in a row.
      precision: "fp16" or "bf16".
      remat: the argument ``remat`` of ``function``; None if it takes none.
      replicas: groups of devices, each of which holds the complete state.
      shared: devices that share the tokens of a row, on the axis "seq".
      network: a network, as ``zerojax plan`` takes it; None for that of the devices.
      rates: figures in which the devices differ from those of their kind.
      zero: further keywords of :func:`zerojax.zero`.
    """

    function: Callable[..., Any]
    devices: str
    seq: int
    precision: str = "fp16"
    remat: bool | None = None
    replicas: int = 1
    shared: int = 1
    network: str | None = None
    rates: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    zero: Mapping[str, object] = dataclasses.field(default_factory=dict)


Opener = Callable[[Setup], Study]


def open_study(setup: Setup, note: Callable[[str], None] = lambda text: None) -> Study:
    """A study with AdamW and one row a device."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    keywords: dict[str, Any] = {"stage": 0, "optimizer": optimizer, setup.precision: True}
    keywords |= setup.zero
    mesh, rates = parse_devices(setup.devices)
    if setup.replicas > 1:
        axes = {"replica": setup.replicas, "data": mesh.size // setup.replicas}
        mesh = topology(rates.kind, mesh.size, axes=axes)
    if setup.shared > 1:
        axes = {"data": mesh.size // setup.shared, "seq": setup.shared}
        mesh = topology(rates.kind, mesh.size, axes=axes)
    config = zero(**keywords, mesh=mesh).config
    rates = dataclasses.replace(rates.over(setup.network), **setup.rates)
    return Study(
        setup.function, config, mesh, rates, rows=None, seq=setup.seq, remat=setup.remat, note=note
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure of a table.

    Attributes:
      case: what the figure is of.
      published, computed: the published figure, and the one computed here.
      detail: the memory of each device, or whatever else the computed figure consists of.
      why: the reason why the two differ, or agree.
    """

    case: str
    published: str
    computed: str
    detail: str
    why: str

    @property
    def cells(self) -> list[str]:
        return [self.case, self.published, self.computed, self.detail, self.why]


@dataclasses.dataclass(frozen=True)
class Section:
    """One published table.

    Attributes:
      title: a heading.
      source: who published it, and what was run.
      ours: what was compiled in its place, where it is not the same.
      rows: its figures.
      figures: the figures of every compile, for JSON.
    """

    title: str
    source: str
    ours: str
    rows: tuple[Row, ...]
    figures: Mapping[str, object]


def states(forecast: Forecast) -> int:
    """Bytes of parameters, gradients and optimizer state at the peak, gathered ones included."""
    memory = forecast.peak.memory
    return sum(memory.get(kind, 0) for kind in (PARAMETERS, GRADIENTS, STATE, GATHERED))


def detail(forecast: Forecast) -> str:
    """The peak by kind, beside the memory of a device."""
    peak, held = forecast.peak.bytes, states(forecast)
    return (
        f"{giga(peak)} of {giga(forecast.rates.room)} GB: model states {giga(held)}, "
        f"activations and the rest {giga(peak - held)}"
    )


def fits(forecast: Forecast) -> str:
    return "fits" if forecast.fits else "does not fit"


def giga(size: float) -> str:
    return f"{size / GIGA:.1f}"


def figures(forecast: Forecast) -> dict[str, object]:
    """Figures of a forecast, for JSON."""
    return {
        "fits": forecast.fits,
        "devices": forecast.devices,
        "kind": forecast.rates.kind,
        "parameters": forecast.parameters,
        "peak_program": forecast.peak.name,
        "peak_bytes": forecast.peak.bytes,
        "room_bytes": forecast.rates.room,
        "memory": dict(forecast.peak.memory),
        "resting_bytes": forecast.plan.bytes_per_device,
        "host_bytes": forecast.host_bytes,
        "tokens_per_second": forecast.tokens_per_second,
        "mfu": forecast.mfu,
        "compile_seconds": forecast.compile_seconds,
    }
