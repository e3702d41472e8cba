"""The benchmark of saving and restoring, on a state of twenty megabytes."""

import dataclasses
import json
from pathlib import Path

import pytest

import zerojax
from benchmarks.checkpoint import Results, answer, memory_table, time_table
from benchmarks.checkpoint_memory import Footprint, footprint
from benchmarks.checkpoint_times import (
    CALL,
    COPY,
    NEXT_STEP,
    SAVE,
    STEP,
    WARM,
    Timing,
    Turns,
    take_turns,
)
from benchmarks.frame import write
from benchmarks.savers import SAVERS

GIGABYTES = 0.02

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    folder = tmp_path_factory.mktemp("checkpoint")
    return take_turns(GIGABYTES, 1, folder, zerojax.mesh(2), cold=False)


@pytest.mark.sweep
def test_everything_is_timed(turns: Turns) -> None:
    assert turns.state_bytes == pytest.approx(GIGABYTES * 1e9, rel=0.1)
    assert 0.99 < turns.disk_bytes["zerojax"] / turns.state_bytes < 1.05
    elsewhere = f"restore to {turns.elsewhere}"
    assert elsewhere == "restore to stage 2 on 1 devices"
    whats = [each.what for each in turns.timings]
    assert whats == [SAVE, WARM, elsewhere, STEP, CALL, NEXT_STEP]
    for each in turns.timings:
        assert each.seconds.keys() == ({*SAVERS, COPY} if each.what == SAVE else {*SAVERS})
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in each.seconds.values())


@pytest.mark.sweep
def test_limits_are_judged_and_recorded(turns: Turns, tmp_path: Path) -> None:
    slow = Timing(what=SAVE, seconds={"zerojax": [1.1, 1, 3], "orbax": [1, 0.9, 1], COPY: [1]})
    assert slow.speed == 0.9
    bad = Results(turns=dataclasses.replace(turns, timings=[slow]), footprints=footprints(13))
    assert bad.missed() == [
        "save: 0.90 of orbax's speed, less than 0.95",
        "restore: 1.30 of orbax's peak memory, more than 1.2",
    ]
    fast = Timing(what=SAVE, seconds={"zerojax": [1], "orbax": [1], COPY: [1]})
    call = Timing(what=CALL, seconds={"zerojax": [2], "orbax": [1]})  # has no limit
    good = dataclasses.replace(turns, timings=[fast, call])
    assert Results(turns=good, footprints=footprints(12)).missed() == []
    record = tmp_path / "checkpoint.md"
    write(record.with_suffix(".json"), "Checkpoint", answer(bad))
    assert "could not be dropped" in record.read_text()
    assert "| save | 1.100 s = " in record.read_text()
    assert f"Limits missed: {'; '.join(bad.missed())}." in record.read_text()
    figures = json.loads(record.with_suffix(".json").read_text())
    assert figures["turns"]["state_bytes"] == turns.state_bytes
    assert len(time_table(turns)) == 1 + len(turns.timings)
    assert len(memory_table(bad)) == 3


def footprints(peak_of_restore: int) -> list[Footprint]:
    """Those of saving are alike, those of restoring 10 by orbax."""
    peaks = {("restore", "zerojax"): peak_of_restore}
    return [
        Footprint(task=task, saver=saver, before=5, peak=peaks.get((task, saver), 10))
        for task in ("save", "restore")
        for saver in SAVERS
    ]


@pytest.mark.sweep
def test_memory_is_that_of_another_process(tmp_path: Path, turns: Turns) -> None:
    save = footprint("save", "zerojax", tmp_path, GIGABYTES)
    assert save.before > turns.state_bytes
    restore = footprint("restore", "zerojax", tmp_path, GIGABYTES)
    assert restore.growth > turns.state_bytes
    assert (tmp_path / "1").exists()
