"""The table and the picture of traffic by link."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.node_traffic import HEADINGS, SETTINGS, draw, markdown, sent, table
from zerojax.foresight.forecast import Traffic

GB = 10**9


def forecast() -> Any:
    traffic = (
        Traffic("all-gather", ("bf16",), 3, 8 * GB, GB, 0.5, 0.1),
        Traffic("to the host", (), 3, GB, 0, 0.5, 0.1),
    )
    return SimpleNamespace(traffic=traffic, parameters=32 * GB, seconds=1.5)


def test_theory_stands_beside_what_was_compiled() -> None:
    rows = table({setting.name: forecast() for setting in SETTINGS})
    assert rows[0] == HEADINGS
    by_name = {row[0]: row[1:] for row in rows[1:]}
    # 64 GB of bf16 parameters: three rings over 64 devices; three over 8, and a sum of the pieces.
    assert by_name["stage 3"] == ["7.00", "165.38", "1.00", "23.62", "1.500 s"]
    theory = by_name["stage 3, a replica group a host"]
    assert (theory[1], theory[3]) == (f"{3 * 56:.2f}", f"{2 * 56 / 8:.2f}")
    assert markdown(rows, "a.png").count("| 7.00 |") == len(SETTINGS)


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "a.svg", [("stage 3", *sent(forecast()))])
    assert (tmp_path / "a.svg").stat().st_size > 1000
