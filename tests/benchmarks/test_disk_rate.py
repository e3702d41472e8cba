"""Rates of the disk beside plain ones, and what is said of them."""

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.disk_rate import Rates, answer, measure

GOOD = Rates(
    cold=True,
    store_write=[80.0, 90.0, 85.0],
    plain_write=[100.0, 100.0, 100.0],
    store_read=[120.0, 50.0, 110.0],
    plain_read=[100.0, 100.0, 100.0],
)


def test_blocks_and_a_file_are_measured_both_ways(tmp_path: Path) -> None:
    rates = measure(tmp_path, nbytes=2**20, block_bytes=2**18, buffer_count=2, turns=2)
    for field in ("store_write", "store_read", "plain_write", "plain_read"):
        found = getattr(rates, field)
        assert len(found) == 2
        assert all(0 < rate < math.inf for rate in found)
    assert not [*tmp_path.iterdir()]


def test_the_limit_is_at_four_fifths_of_the_plain_rate() -> None:
    assert (GOOD.write, GOOD.read) == (0.85, 1.1)
    assert GOOD.missed() == []
    slow = dataclasses.replace(GOOD, store_write=[79.0, 79.0, 99.0])
    assert slow.missed() == ["write: 0.79 of 0.8"]


@pytest.mark.parametrize(("cold", "said"), [(True, "nothing of it in memory"), (False, "perhaps")])
def test_the_record(cold: bool, said: str) -> None:
    text, table = answer(dataclasses.replace(GOOD, cold=cold), 1, 16).parts
    assert isinstance(text, str)
    assert said in text
    assert table.rows[1] == ["write", "85", "100", "0.85", "0.8"]
