"""The console command itself: help, versions, and streams that the caller closed."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zerojax.__main__ import COMMANDS, app


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_all_commands(option: str) -> None:
    result = CliRunner().invoke(app, [option])
    assert result.exit_code == 0
    assert all(f" {name} " in result.stdout for name in COMMANDS)
    assert CliRunner().invoke(app, ["explain", option]).exit_code == 0


def test_versions() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"zerojax {version('zerojax')}, jax {version('jax')}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["xyz"], "No such command 'xyz': there are estimate, explain, export,"),
        (["plan", "--modle", "gpt2"], "--model"),
        (["export", "nowhere", "out"], "nowhere does not exist"),
        (["fit", "--model", "a:b", "--devices", "h100:8", "--config", "none.json"], "no such file"),
    ],
)
def test_wrong_input(args: list[str], says: str) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_help_and_wrong_paths_import_no_jax(tmp_path: Path) -> None:
    script = """
import sys
from typer.testing import CliRunner
from zerojax.__main__ import COMMANDS, app
calls = [[name, "-h"] for name in COMMANDS]
calls += [["inspect", "nowhere"], ["export", "nowhere", "out"], ["plan"], ["fit"], ["estimate"]]
print([CliRunner().invoke(app, call).exit_code for call in calls], "jax" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == [*f"{[0] * len(COMMANDS) + [2] * 5}".split(), "False"]


def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_ZEROJAX_COMPLETE", "complete_bash")
    for words, expected in (("zerojax ins", "inspect"), ("zerojax plan --dev", "--devices")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        result = CliRunner().invoke(app, [], prog_name="zerojax")
        assert result.stdout.split() == [expected]
