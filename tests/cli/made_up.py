"""Trials and plans that are made up."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from zerojax.cli.options import StepOptions
from zerojax.cli.planned import Planned
from zerojax.config import ZeroConfig
from zerojax.devices.rates import rates
from zerojax.foresight.choice import Choice
from zerojax.foresight.forecast import Compile, Forecast, ProgramCost, Traffic

GB = 10**9
GIVEN = Choice(stage=3, micro=4, accumulation=2, remat=False)


def cost(name: str = "step", **other: Any) -> ProgramCost:
    sizes = {"parameters": 20 * GB, "activations": 10 * GB, "logits": 123}
    traffic = (
        Traffic("all-gather", ("bf16", "f32"), 1234, 5 * GB, 0, 0.5, 0.125),
        Traffic("to the device", (), 7, 3 * GB, 0, 0.02, 0.02),
    )
    made = dict(
        name=name, memory=sizes, host=0, seconds=2.0, forward=2e14,
        traffic=traffic, compile=Compile(12.0),
    )  # fmt: skip
    return ProgramCost(**{**made, **other})


def kept(*elements: int) -> Any:
    """What stays gathered: parameters of so many elements, of 2 bytes each."""
    leaves = [SimpleNamespace(shape=(n,), bytes_per_device=2 * n) for n in elements]
    held = 2 * sum(elements)
    return SimpleNamespace(leaves=leaves, elements=held // 2, bytes=held, saved=held, notes=[])


def forecast(*programs: ProgramCost, kind: str = "h100", **other: Any) -> Forecast:
    axes = other.pop("axes", {"data": 8})
    mesh = SimpleNamespace(devices=np.zeros(8), shape=axes, axis_names=tuple(axes))
    config = ZeroConfig(gradient_accumulation_steps=8)
    plan: Any = SimpleNamespace(
        mesh=mesh, live=other.pop("live", kept()), fp8=SimpleNamespace(notes=()), config=config
    )
    made = dict(
        plan=plan, rates=rates(kind), parameters=6_738_415_616, tokens=65536,
        programs=programs or (cost(),), host_bytes=0, disk_bytes=0,
    )  # fmt: skip
    return Forecast(**{**made, **other})


def planned(found: Forecast | None = None, **other: Any) -> Planned:
    asked = StepOptions("mine:[red]", "h100:8", 64, 1024, None, None, None, as_json=False)
    made = dict(asked=asked, config="a.json", choice=GIVEN)
    return Planned(forecast=found or forecast(), **{**made, **other})
