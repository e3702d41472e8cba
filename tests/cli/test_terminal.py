"""How wide the commands print, to a terminal and elsewhere."""

import re

import pytest

from zerojax.cli.terminal import console, table

LONG = "device memory, " * 20


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    columns = {"what": lambda n: LONG + "x" * n, ">none": lambda n: "", ">bytes": lambda n: "1"}
    made = table(columns, [80])
    console().print(made)
    plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    return [line for line in plain.splitlines() if line.strip()]


def test_one_thing_is_one_line_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    heads, _, row = printed(capsys)
    assert heads.split() == ["what", "bytes"]
    assert row.split() == [*LONG.split(), "x" * 80, "1"]
    assert heads.rindex("s") == row.rindex("1")
