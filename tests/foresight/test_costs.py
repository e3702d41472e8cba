"""Programs that XLA refuses to make, as it does for TPUs whose memory they do not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState
from optax import sgd

import zerojax
from zerojax.devices.rates import rates
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import forecast, measure, measure_memory, wanted_bytes
from zerojax.xla.lowered import LoweredProgram

TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(34.50G) exceeds available HBM (15.75G)."
)
USED = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. "
    "Exceeded hbm capacity by 4.75G."
)


class Refusing:
    """A lowered program that cannot be compiled."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError(self.message)


def test_the_least_that_it_takes() -> None:
    assert wanted_bytes(TEMPORARIES) == 34.5 * 2**30
    assert wanted_bytes(USED) == 20.5 * 2**30
    assert wanted_bytes("RESOURCE_EXHAUSTED: no") == 0
    assert wanted_bytes("INTERNAL: Used 3.0G") is None


def test_a_step_that_is_refused_does_not_fit() -> None:
    zero = zerojax.zero(stage=1)
    params = {"w": jnp.zeros((8, 8))}
    state = zero.init(lambda: TrainState.create(apply_fn=print, params=params, tx=sgd(0.1)))
    plan, v5e = zero.plan(state), rates("v5e")

    def told(message: str, name: str = "step", **options: Any) -> Any:
        lowered: Any = Refusing(message)
        return forecast([LoweredProgram(name, lowered, 1)], plan, v5e, **options)

    found = told(TEMPORARIES)
    assert not found.fits
    assert not found.is_complete
    assert found.peak.bytes == 34.5 * 2**30
    assert not told("RESOURCE_EXHAUSTED: no").fits
    assert told("RESOURCE_EXHAUSTED: no").peak.bytes == v5e.memory
    assert (
        told(TEMPORARIES, measured=measure_memory).peak.bytes == found.peak.bytes
    )  # before a first run
    # Of several programs too it is what XLA says and nothing more.
    assert told(TEMPORARIES, "gradients").peak.bytes == found.peak.bytes
    other: Any = Refusing("INTERNAL: a fault")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fault"):
        measure(other, ParameterShapes.of(plan), v5e, (0,) * 8)
