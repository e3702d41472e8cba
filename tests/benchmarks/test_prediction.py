"""The comparison of predictions with a GPU, as far as it goes without one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.prediction
from benchmarks.prediction import CASES, case, predict, run, table, verdict

TINY = dataclasses.replace(case("mini", 3, 2, True), seq=16)


def test_there_are_cases_of_every_kind() -> None:
    choices = [each.choice for each in CASES]
    assert len(choices) >= 10
    assert {each.stage for each in choices} == {0, 1, 2, 3}
    assert {each.remat for each in choices} == {False, True}
    assert len({each.offload for each in choices}) == 3


@pytest.mark.sweep
def test_a_case_runs() -> None:
    found = run(TINY)
    assert found["fits"]
    assert found["seconds"] > 0
    assert found["bytes"] is None  # CPUs keep no statistic


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_a_case_is_predicted() -> None:
    found = predict(TINY, "h100")
    assert found["fits"]
    assert found["bytes"] > 12 * 1_300_000  # masters and moments


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        ({"fits": True, "bytes": 103, "seconds": 1.2}, "ok"),
        ({"fits": True, "bytes": 110, "seconds": 1.2}, "bytes"),
        ({"fits": True, "bytes": 103, "seconds": 2.0}, "seconds"),
        ({"fits": False, "bytes": None, "seconds": None}, "fit"),
    ],
)
def test_verdicts(measured: dict[str, object], says: str) -> None:
    predicted = {"fits": True, "bytes": 100, "seconds": 1.0}
    assert verdict(predicted, measured) == says
    (_, row) = table([{"case": "a", "predicted": predicted, "measured": measured}])
    assert row[-1] == says


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.prediction"],
        capture_output=True,
        text=True,
        cwd=Path(benchmarks.prediction.__file__).parents[1],
    )
    assert done.returncode == 1
    assert "no GPU here" in done.stderr
