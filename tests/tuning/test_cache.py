"""Measurements that are remembered: what was written, or nothing."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from zerojax.devices.rates import rates
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import Measurement
from zerojax.foresight.forecast import Traffic
from zerojax.tuning import cache
from zerojax.tuning.cache import Cache

TRAFFIC = Traffic("all-gather", ("bfloat16", "float32"), 3, 1 << 20, 0, 0.25, 0.125)
MEASURED = Measurement(
    memory={"parameters": 80 << 30, "activations": 5}, seconds=0.5, traffic=(TRAFFIC,),
    compile_seconds=7.0,
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "measure", lambda *_: MEASURED)


def ask(folder: Path) -> tuple[Measurement, bool]:
    """The measurement of a program, and whether it was remembered."""
    lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
    known = Cache(folder)
    measurement = known(lowered, ParameterShapes(frozenset(), 0), rates("h100"), (0,))
    return measurement, known.hits == 1


@pytest.mark.usefixtures("measured")
def test_what_was_measured_is_remembered(tmp_path: Path) -> None:
    assert ask(tmp_path) == (MEASURED, False)
    assert ask(tmp_path) == (dataclasses.replace(MEASURED, compile_seconds=0.0), True)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("value", [15 << 30, -1, "x", math.nan, None, True, [], 1.5, 10**400])
@pytest.mark.parametrize("digest", ["as it was", "of the change"])
def test_what_was_changed_is_measured_anew(tmp_path: Path, value: object, digest: str) -> None:
    ask(tmp_path)
    [file] = tmp_path.glob("*.json")
    first, text = file.read_text().splitlines()
    changed = json.loads(text)
    changed["memory"]["parameters"] = value
    changed = json.dumps(changed)
    if digest == "of the change" and not isinstance(value, int):
        first = cache._digest(changed)
    file.write_text(f"{first}\n{changed}\n")
    assert ask(tmp_path) == (MEASURED, False)
    assert ask(tmp_path)[1]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("text", ["", "x", "{}", "{}\n{}", "a\nb\nc", "[" * 100_000])
def test_what_is_no_measurement(tmp_path: Path, text: str) -> None:
    ask(tmp_path)
    [file] = tmp_path.glob("*.json")
    file.write_text(text)
    assert ask(tmp_path) == (MEASURED, False)
