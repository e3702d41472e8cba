"""`zerojax fit`, compiled for the CPU devices of the tests."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from cli.made_up import GB, GIVEN, cost, forecast
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import app
from zerojax.cli.fit import fit
from zerojax.cli.fit_run import about_stages
from zerojax.cli.options import Attention
from zerojax.foresight.forecast import Traffic
from zerojax.foresight.trials import Trial
from zerojax.models.attention import ASKED
from zerojax.tuning.search import COMPILES


def test_options_without_jax_agree_with_the_search() -> None:
    """The options repeat two values, as a command that imports them would import JAX."""
    assert inspect.signature(fit).parameters["compiles"].default == COMPILES
    assert Attention.__metadata__[0].metavar == "|".join(ASKED)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_cpus: Any) -> Any:
    """``run(room, *options)``: the command, on devices with so many bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = tmp_path / "zero.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": "auto"}}))

    def command(room: int, *options: str) -> Any:
        on_cpus(room)
        asked = ["fit", "--model", "mine:sound", "--config", str(config), "--devices", "h100:8"]
        return CliRunner().invoke(app, [*asked, "--seq", "8", *options])

    return command


@pytest.mark.slow
def test_the_fastest_is_written_and_remembered(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "best.json"
    made = run(10**9, "--batch", "16", "--out", str(out))
    assert made.exit_code == 0, made.output
    assert "remembered. Fastest: stage" in made.output
    assert "were not tried: 'mine:sound' takes no `remat_policy`" in made.output
    best = json.loads(out.read_text())
    assert best["train_batch_size"] == 16
    zerojax.zero(out)  # a config like any other

    again = run(10**9, "--batch", "16", "--json")
    found = json.loads(again.stdout)
    assert found["config"] == best
    speeds = [each["tokens_per_second"] for each in found["ranking"]]
    assert speeds == sorted(speeds, reverse=True)
    assert {each["choice"]["stage"] for each in found["ranking"]} == {0, 1, 2, 3}
    assert "0 programs compiled" in run(10**9, "--batch", "16").output
    assert "The search ended" not in made.output
    short = run(10**9, "--batch", "32", "--compiles", "1").output
    assert "limit (--compiles 1, --minutes 20), before it tried stage 0; stage 1; stage 2" in short


def test_whether_pipeline_stages_pay() -> None:
    traffic = Traffic("all-gather", ("bf16",), 1, GB, GB, 1.0, 0.8)
    plain = Trial(GIVEN, forecast(cost(traffic=(traffic,))))
    staged = Trial(
        dataclasses.replace(GIVEN, pipeline=2),
        forecast(cost(seconds=1.6), axes={"stage": 2, "data": 4}),
    )
    assert [*about_stages([plain])] == []
    first, mesh = about_stages([staged, plain])
    assert first == (
        "2 pipeline stages pay: 1.25 times the tokens/s of the fastest choice without, 40% of "
        "whose step waits for the network between hosts."
    )
    assert mesh.endswith("mesh=zerojax.mesh(axes={'stage': 2, 'data': 4}).")
    slower = dataclasses.replace(staged, forecast=forecast(cost(seconds=4.0)))
    (only,) = about_stages([plain, slower])
    assert only.startswith("2 pipeline stages do not pay: 0.50 times")


def test_nothing_fits(run: Any) -> None:
    made = run(10, "--batch", "16", "--compiles", "2")
    assert made.exit_code == 3
    assert "nothing fits 8 x h100" in made.output
    assert "The search ended" not in made.output
    early = run(10**9, "--batch", "16", "--minutes", "0")
    assert early.exit_code == 3
    assert "the limit of compiles or of seconds was reached before these: stage" in early.output
    assert "; and 8 more. Raise the limit (--compiles 40, --minutes 0)" in early.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batch", "12"), "write 8 or 16"),
        (("--out", "no/such/folder/best.json"), "cannot be written: create its folder"),
    ],
)
def test_bad_input(run: Any, options: tuple[str, ...], says: str) -> None:
    made = run(10**9, *options)
    assert made.exit_code == 2
    assert says in made.output
