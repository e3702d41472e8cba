"""`zerojax plan --collectives`: what a model's step sends, by the model's lines."""

import inspect
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, on_cpus: Any) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", _no_compile)


def _no_compile(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("compiled")


def run(config: Path, *args: Any, model: str = "mine:sound") -> Any:
    given = ["--model", model, "--config", config, "--devices", "h100:8", "--seq", 16, *args]
    return CliRunner().invoke(app, ["plan", *map(str, given), "--collectives"])


def test_a_table(config: Path) -> None:
    result = run(config)
    assert result.exit_code == 0, result.output
    (head,) = [
        line for line in result.stdout.splitlines() if "Dense_2" in line and "kernel" in line
    ]
    assert "mine.py" in head
    assert "all-gather: each device sends" in result.stdout


def test_json(config: Path) -> None:
    found = json.loads(run(config, "--json").stdout)
    sums = dict.fromkeys(found["bytes_a_step"], 0)
    for row in found["collectives"]:
        sums[row["kind"]] += row["bytes"] * row["times"]
    assert sums == found["bytes_a_step"]
    assert {row["line"].partition(":")[0] for row in found["collectives"] if row["arrays"]} == {
        "mine.py"
    }


def test_the_lines_of_a_model_of_zerojax(config: Path) -> None:
    from zerojax.models import gpt

    source = inspect.getsource(gpt).splitlines()
    rows = json.loads(run(config, "--json", model="mine:cut").stdout)["collectives"]
    reduced = [
        row for row in rows if row["kind"] == "reduce-scatter" and "c_fc" in str(row["arrays"])
    ]
    (number,) = [i for i, line in enumerate(source, 1) if '"c_fc")(x), "c_fc")' in line]
    assert {row["line"] for row in reduced} == {f"gpt.py:{number}"}
