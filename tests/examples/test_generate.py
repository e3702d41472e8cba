"""The main job's checkpoint continues a prompt."""

import pathlib

import numpy as np
import pytest
from rich.control import strip_control_codes
from saved_run import Saved, save
from typer.testing import CliRunner, Result

import zerojax
from examples.generate import app
from zerojax.models.gpt import SIZES

pytestmark = pytest.mark.usefixtures("quick_compile")

PROMPT = "né"
ROOM = SIZES["tiny"]["block_size"] - len(PROMPT.encode())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, quick_compile: None) -> Saved:
    return save(tmp_path_factory.mktemp("run"))


def expected(saved: Saved) -> str:
    """The most probable bytes after the prompt, by the state that was saved."""
    rows = [list(PROMPT.encode())]
    tokens = zerojax.generate(saved.model, saved.state, rows, max_new_tokens=ROOM, eos=0)
    after = bytes(np.asarray(tokens)[0, -ROOM:].tolist()).partition(b"\0")[0]
    return after.decode("utf-8", "replace")


def run(folder: pathlib.Path, prompt: str, *options: str) -> Result:
    arguments = ["--run", str(folder), "--prompt", prompt, *options]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_it_prints_the_prompt_and_all_that_fits_the_block(saved: Saved) -> None:
    result = run(saved.folder, PROMPT, "--temperature", "0")
    assert result.stdout == strip_control_codes(PROMPT + expected(saved)) + "\n"
