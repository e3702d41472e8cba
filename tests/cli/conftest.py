"""A user's models on the path, and devices that are the CPUs of the tests."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import zerojax
from zerojax.cli import planning
from zerojax.devices.rates import RESERVE, rates


@pytest.fixture(autouse=True)
def _models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`mine` is a module, no width is set; a command leaves JAX as it was."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
    sys.modules.pop("mine", None)


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Compiles for the eight CPU devices of the tests; `on_cpus(room)` leaves so many bytes."""
    jax.config.update("jax_disable_most_optimizations", True)

    def room(room: int = 10**9) -> None:
        made = dataclasses.replace(rates("h100"), memory=RESERVE + room)
        monkeypatch.setattr(planning, "parse_devices", lambda *_: (zerojax.mesh(), made))

    room()
    return room


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of stage 3."""
    path = tmp_path / "zero.json"
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    path.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": 8}))
    return path
