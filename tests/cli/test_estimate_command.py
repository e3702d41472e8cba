"""`zerojax estimate --model`: a model's parameters, counted."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from zerojax.__main__ import app
from zerojax.cli.estimate import assumed_layer, counted


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["estimate", *args])


def test_a_model_is_counted() -> None:
    total = 64 * 16 + 2 * (16 * 16 + 16) + 16 * 64 + 64
    assert counted("mine:sound", 8) == (total, 16 * 64 + 64)
    given = run("--params", str(total), "--largest-layer", str(16 * 64 + 64))
    result = run("--model", "mine:sound", "--nodes", "1")
    assert result.exit_code == 0
    assert result.output == given.output
    assert "ZeRO-3" in result.output


def test_the_largest_layer_is_assumed_where_only_the_parameters_are_known() -> None:
    result = run("--params", "6.74e9")
    assert result.exit_code == 0
    assert "ZeRO-3" in result.output
    assert "assumed largest layer: 133," in result.output
    told = json.loads(run("--params", "6.74e9", "--json").stdout)
    assert told["largest_layer_assumed"]
    assert [each["stage"] for each in told["estimates"]] == [2, 3]
    assert assumed_layer(1000) == 1000  # not more than there are


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "pass either --params, with or without --largest-layer, or --model"),
        (["--model", "none-such"], "unknown model 'none-such'."),
        (["--model", "mine:three"], "model 'mine:three' cannot be counted: a int is no flax"),
        (["--model", "mine:raises"], "KeyError: 'no such thing'\n  File "),
    ],
)
def test_what_will_not_do(args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
