"""The console command itself: help, versions, and streams that the caller closed."""

from importlib.metadata import version

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
