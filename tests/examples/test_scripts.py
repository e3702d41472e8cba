"""The examples to copy: each ends with the number that its docstring promises."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
NUMBER = re.compile(r"(\S.* )(\d+\.\d+)")

pytestmark = pytest.mark.usefixtures("quick_compile")


def promised(path: Path) -> tuple[str, float]:
    """The last line of its output as its docstring has it, indented: words, number."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return numbered(next(line[4:] for line in docstring.splitlines() if line.startswith("    ")))


def numbered(line: str) -> tuple[str, float]:
    match = NUMBER.fullmatch(line)
    assert match, line
    return match[1], float(match[2])


@pytest.mark.parametrize("name", ["minimal", "minimal_nnx", "evaluate"])
def test_it_ends_as_its_docstring_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / f"{name}.py"
    runpy.run_path(str(path))
    words, number = numbered(capsys.readouterr().out.splitlines()[-1])
    assert words == promised(path)[0]
    assert number == pytest.approx(promised(path)[1], abs=0.02)


def test_killed_and_run_again_it_ends_as_its_docstring_says(
    tmp_path: Path,
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, folder = FOLDER / "resume.py", str(tmp_path)
    before = []
    command = [sys.executable, str(path), folder]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            before.append(line.strip())
            if line.startswith("step  70"):
                break
        run.kill()
    monkeypatch.setattr(sys, "argv", [str(path), folder])
    runpy.run_path(str(path))
    first, *after = capsys.readouterr().out.splitlines()
    done = int(first.removeprefix("goes on after step "))
    assert 40 <= done < 70  # the save of step 60 may not have ended
    assert after[: (70 - done) // 10] == before[done // 10 :]
    words, number = numbered(after[-1])
    assert words == promised(path)[0]
    assert number == pytest.approx(promised(path)[1], abs=0.02)


def test_minimal_is_short() -> None:
    assert len((FOLDER / "minimal.py").read_text().splitlines()) <= 60
