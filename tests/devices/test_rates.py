"""The option that lets XLA use a device's memory."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerojax.devices.rates import memory_options, rates
from zerojax.xla.compiler import SLOP_FACTOR, memory_limit


def device(name: str) -> Any:
    return SimpleNamespace(device_kind=name)


@pytest.mark.parametrize("arguments", [0, 4 * 10**9, 60 * 10**9])
def test_the_limit_is_the_room(arguments: int) -> None:
    h100 = rates("h100")
    slop = memory_options(device("NVIDIA H100 80GB HBM3"), arguments)[SLOP_FACTOR]
    assert isinstance(slop, int)
    limit = memory_limit(h100.memory, arguments, slop)
    assert 0.99 * h100.room < limit <= h100.room


def test_no_option_helps_where_arguments_fill_the_memory() -> None:
    assert memory_options(device("NVIDIA H100 80GB HBM3"), 70 * 10**9) == {}


def test_unknown_devices_keep_xlas_limit() -> None:
    assert memory_options(device("cpu"), 10**9) == {}
