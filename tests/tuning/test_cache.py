"""Measurements that are remembered: what was written, or nothing."""

import dataclasses
import json
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


@pytest.mark.parametrize("value", ["x", None])
def test_what_was_changed_is_measured_anew(tmp_path: Path, value: object) -> None:
    ask(tmp_path)
    [file] = tmp_path.glob("*.json")
    changed = json.loads(file.read_text())
    changed["memory"]["parameters"] = value
    file.write_text(json.dumps(changed))
    assert ask(tmp_path) == (MEASURED, False)
    assert ask(tmp_path)[1]


@pytest.mark.parametrize("text", ["", "{}\n{}", "a\nb\nc"])
def test_what_is_no_measurement(tmp_path: Path, text: str) -> None:
    ask(tmp_path)
    [file] = tmp_path.glob("*.json")
    file.write_text(text)
    assert ask(tmp_path) == (MEASURED, False)
