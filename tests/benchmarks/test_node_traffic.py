"""The table and the picture of traffic by link."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.node_traffic import HEADINGS, SETTINGS, draw, sent, table
from zerojax.foresight.forecast import Traffic

GB = 10**9


def forecast(devices: int) -> Any:
    traffic = (
        Traffic("all-gather", ("bf16",), 3, 8 * GB, GB, 0.5, 0.1),
        Traffic("to the host", (), 3, GB, 0, 0.5, 0.1),
    )
    plan = SimpleNamespace(bytes_per_device=6 * GB)
    return SimpleNamespace(
        traffic=traffic, plan=plan, devices=devices, parameters=32 * GB, seconds=1.5
    )


def rows_of(devices: int) -> dict[str, list[str]]:
    rows = table({setting.name: forecast(devices) for setting in SETTINGS})
    assert rows[0] == HEADINGS
    return {row[0]: row[1:] for row in rows[1:]}


def test_theory_stands_beside_what_was_compiled() -> None:
    # 384 GB of state; 64 GB of bf16 parameters: three rings over 64 devices.
    rows = rows_of(64)
    assert rows["stage 0"][1] == "384.00"
    assert rows["stage 3"] == ["6.00", "6.00", "7.00", "165.38", "1.00", "23.62", "1.500 s"]
    assert rows_of(24)["stage 3"][1] == "16.00"


@pytest.mark.parametrize(("devices", "between"), [(24, 64 * 2 / 3 / 4), (64, 64 * 7 / 8 / 4)])
def test_what_stays_in_a_host(devices: int, between: float) -> None:
    """Three rings over 8 devices; between hosts two of an eighth of the parameters."""
    rows = rows_of(devices)
    for name, resting in (
        ("stage 3, a secondary shard in each host (hpZ)", 384 / devices),
        ("stage 3, a replica group in each host", 384 / 8),
    ):
        figures = [rows[name][column] for column in (1, 3, 5)]
        assert figures == [f"{resting:.2f}", f"{3 * 56:.2f}", f"{between:.2f}"]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(64, [("stage 3, near", 6 * GB, *sent(forecast(64)))], tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000
