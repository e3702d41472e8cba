"""Measurements that are remembered: what was written, or nothing."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from zerojax.devices.rates import rates
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import Measurement
from zerojax.foresight.forecast import Compile, Traffic
from zerojax.tuning.cache import Cache

TRAFFIC = Traffic("all-gather", ("bfloat16", "float32"), 3, 1 << 20, 0, 0.25, 0.125)
MEASURED = Measurement(
    memory={"parameters": 80 << 30, "activations": 5}, seconds=0.5, traffic=(TRAFFIC,),
    compile=Compile(7.0),
)  # fmt: skip


def ask(folder: Path) -> tuple[Measurement, bool]:
    """The measurement of a program, and whether it was remembered."""
    lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
    known = Cache(folder, lambda *_: MEASURED)
    measurement = known(lowered, ParameterShapes(frozenset(), 0), rates("h100"), (0,))
    return measurement, known.hits == 1


def test_what_was_measured_is_remembered(tmp_path: Path) -> None:
    assert ask(tmp_path) == (MEASURED, False)
    assert ask(tmp_path) == (dataclasses.replace(MEASURED, compile=Compile(0.0)), True)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("text", ["", '"x"', "null", "{}\n{}", "a\nb\nc"])
def test_what_was_changed_is_measured_anew(tmp_path: Path, whole: bool, text: str) -> None:
    ask(tmp_path)
    [file] = tmp_path.glob("*.json")
    written = file.read_text()
    file.write_text(text if whole else written.replace(str(80 << 30), text))
    assert ask(tmp_path) == (MEASURED, False)
    assert ask(tmp_path)[1]
