"""The examples to copy: each ends with the number that its docstring promises."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from promised import EXAMPLES, numbered, promised

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", ["minimal", "minimal_nnx", "evaluate"])
def test_it_ends_as_its_docstring_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / f"{name}.py"
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
    path, folder = EXAMPLES / "resume.py", str(tmp_path)
    script = f"""
import builtins, os, runpy, signal
def said(line, print=print):
    print(line, flush=True)
    if line.startswith("step  70"):
        os.kill(os.getpid(), signal.SIGKILL)
builtins.print = said
runpy.run_path({str(path)!r})
"""
    command = [sys.executable, "-c", script, folder]
    killed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -signal.SIGKILL
    before = [line.strip() for line in killed.stdout.splitlines()]
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
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 60
