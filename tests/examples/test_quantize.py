"""The main job's checkpoint is quantized, and its held-out loss compared."""

import pathlib
import re
from typing import NamedTuple

import pytest
from saved_run import save
from typer.testing import CliRunner, Result

from examples.quantize import app
from examples.run_clm import data
from zerojax.models.gpt import SIZES

pytestmark = pytest.mark.usefixtures("quick_compile")


class Run(NamedTuple):
    folder: pathlib.Path
    text: pathlib.Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, quick_compile: None) -> Run:
    folder = tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} is followed by {i + 1}\n" for i in range(200)))
    split = data.split([data.read_text(text)], SIZES["tiny"]["block_size"])
    save(folder / "clm", text=split.fingerprint, n_embd=64)
    return Run(folder / "clm", text)


def quantize(trained: Run, *options: str, text: pathlib.Path | None = None) -> Result:
    arguments = ["--run", str(trained.folder), "--text", str(text or trained.text), *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_the_losses_are_compared(trained: Run) -> None:
    result = quantize(trained, "--bits", "4", "--max_loss", "100%")
    assert result.exit_code == 0, result.stderr
    before, after = map(float, re.findall(r"\d+\.\d+(?=[,:])", result.stdout))
    assert before != after
    assert abs(after / before - 1) < 0.2
    result = quantize(trained, "--bits", "4", "--max_loss", "-100%")
    assert result.exit_code == 2
    assert "more than --max_loss -100.00%: write --bits 8 or a smaller" in result.stderr
