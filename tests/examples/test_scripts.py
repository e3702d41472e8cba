"""The examples to copy end with the number that their docstring promises."""

import ast
import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
LAST_LINE = re.compile(r"^    (\S.*) (\d+\.\d+)$", re.M)  # what is printed, and its number

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", ["minimal"])
def test_it_ends_as_its_docstring_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / f"{name}.py"
    promised = LAST_LINE.search(ast.get_docstring(ast.parse(path.read_text())) or "")
    runpy.run_path(str(path))
    printed = LAST_LINE.search("    " + capsys.readouterr().out.splitlines()[-1])
    assert promised
    assert printed
    assert printed[1] == promised[1]
    assert float(printed[2]) == pytest.approx(float(promised[2]), abs=0.02)


def test_minimal_is_short() -> None:
    assert len((FOLDER / "minimal.py").read_text().splitlines()) <= 60
