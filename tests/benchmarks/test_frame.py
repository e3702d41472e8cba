"""The frame of the benchmarks: a command, its tables, and the record beside its figures."""

import argparse
import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from benchmarks.frame import Answer, Table, argument, question

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Figure:
    bytes: int


@question("toy", "A toy", argument("--size", type=int, default=1))
def toy(options: argparse.Namespace) -> Answer:
    table = Table([["name", "bytes"], ["toy", str(options.size)]], title="Sizes")
    return Answer(
        {"costs": [Figure(options.size)]},
        ["A note.", table],
        draw=lambda path: path.write_bytes(b"picture"),
        missed=["too large"] * (options.size > 1),
    )


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["toy", *words])
    toy()


def test_a_record_has_figures_tables_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--record", str(tmp_path))
    (page,), (figures,), (picture,) = (tmp_path.glob(f"*-toy.{x}") for x in ("md", "json", "png"))
    text = page.read_text()
    assert text.startswith("# A toy\n\nDate: ")
    assert "--record" in text.splitlines()[2]
    assert "A note.\n\n## Sizes\n\n| name | bytes |\n| --- | ---: |\n| toy | 1 |" in text
    assert f"Limits missed: none.\n\n![A toy]({picture.name})" in text
    assert json.loads(figures.read_text())["costs"] == [{"bytes": 1}]
    assert "Sizes" in capsys.readouterr().out


def test_a_missed_limit_is_recorded_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="too large"):
        run(monkeypatch, "--size", "2", "--json", str(tmp_path / "toy.json"))
    assert "Limits missed: too large." in (tmp_path / "toy.md").read_text()


QUESTIONS = sorted(
    file.stem
    for file in (ROOT / "benchmarks").glob("*.py")
    if "\n@question(" in file.read_text() and file.stem != "frame"
)


def test_every_question_has_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in QUESTIONS:
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="0"):
            module.main()
        said = capsys.readouterr().out
        assert "--record FOLDER" in said
        assert f"python -m benchmarks.{name}" in said
