"""How wide the commands print, to a terminal and elsewhere."""

import re
from collections.abc import Callable

import pytest

from zerojax.cli.terminal import console, table

LONG = "device memory, " * 20


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        columns = {
            "what": lambda n: LONG + "x" * n,
            ">none": lambda n: "",
            ">bytes": lambda n: "1 GB",
        }
        console().print(table(columns, [80]))
        plain = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        return [line for line in plain.splitlines() if line.strip()]

    return lines


def test_one_thing_is_one_line_elsewhere(printed: Callable[[], list[str]]) -> None:
    heads, _, row = printed()
    assert heads.split() == ["what", "bytes"]
    assert row.split() == [*LONG.split(), "x" * 80, "1", "GB"]
    assert heads.rindex("s") == row.rindex("B")


def test_text_folds_at_the_columns_that_are_set_and_figures_stay_whole(
    printed: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    heads, _, *rows = printed()
    assert max(map(len, (heads, *rows))) <= 70
    assert rows[0].split()[-2:] == ["1", "GB"]
    text = "".join("".join(row.removesuffix("1 GB ").split()) for row in rows)
    assert text == (LONG + "x" * 80).replace(" ", "")
