"""`zerojax config`: questions, the file, and files that exist."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from zerojax.__main__ import app


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*words: str, answers: str = "") -> Result:
    environ = {"JAX_PLATFORMS": "cpu"}
    return CliRunner().invoke(app, ["config", *words], input=answers, obj=environ)


def test_defaults_and_what_comes_next(folder: Path) -> None:
    done = config("--yes")
    assert done.exit_code == 0, done.stderr
    text = (folder / "ds_config.json").read_text()
    assert json.loads(text)["zero_optimization"] == {"stage": 2}
    assert text in done.stdout
    assert "No GPU here." in done.stdout
    assert "python -m zerojax explain ds_config.json --devices 1\n" in done.stdout


def test_answers_become_the_yaml(folder: Path) -> None:
    """Two machines; stage 3 with offload; empty answers and wrong ones."""
    answers = "2\n1\nhost0\n\n4\n7\n3\ncpu\n\nbf16\n0\n2\n\n"
    done = config("--output", "my config.yaml", answers=answers)
    assert done.exit_code == 0, done.stderr
    written = yaml.safe_load((folder / "my config.yaml").read_text())
    assert (written["num_machines"], written["machine_rank"], written["num_processes"]) == (2, 1, 8)
    assert written["deepspeed_config"]["offload_optimizer_device"] == "cpu"
    assert written["deepspeed_config"]["gradient_accumulation_steps"] == 2
    assert "launch --config-file 'my config.yaml' train.py" in done.stdout
    assert "Please select one of the available options" in done.stdout
    assert "A number from 1 is needed" in done.stdout


def test_an_existing_file_is_kept_unless_asked(folder: Path) -> None:
    (folder / "a.json").write_text("mine")
    output = ["--output", "a.json"]
    assert config(*output, answers="\n" * 20).exit_code == 1
    assert config("--yes", *output).exit_code == 2
    assert (folder / "a.json").read_text() == "mine"
    questions = 8  # of the JSON, at stage 2
    assert config(*output, answers="\n" * questions + "y\n").exit_code == 0
    assert json.loads((folder / "a.json").read_text())["gradient_clipping"] == 1.0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--output", "a.txt"], "ends in .json or .yaml or .yml"),
        (["--output", "none/a.json"], "no file can be written there"),
        ([], "The input ended before the last answer; --yes takes"),
    ],
)
def test_wrong_input(words: list[str], says: str) -> None:
    wrong = config(*words)
    assert wrong.exit_code == 2
    assert says in wrong.stderr
