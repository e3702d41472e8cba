"""The main job's checkpoint continues a prompt."""

import pathlib

import jax
import numpy as np
import pytest
from rich.control import strip_control_codes
from saved_run import Saved, save
from typer.testing import CliRunner, Result

import zerojax
from examples.generate import app, continuation, restored
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


def test_a_seed_decides_the_draws(saved: Saved) -> None:
    model, params, _ = restored(saved.folder)
    how = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}

    def drawn(seed: int) -> str:
        key = jax.random.key(seed)
        return "".join(continuation(model, params, PROMPT, 12, key=key, **how))

    assert drawn(0) == drawn(0) != drawn(1)


def test_the_end_of_a_document_ends_the_text(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = ([byte] for byte in [*b"a\xc3\xa9", 300, 0xC3, 0, ord("b")])
    monkeypatch.setattr(zerojax, "generate_stream", lambda *_, **__: drawn)
    text = [*continuation(saved.model, saved.state, PROMPT)]
    assert text == ["a", "", "é", "\ufffd", "", "\ufffd"]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", [], "--prompt is empty: write at least one character"),
        ("x" * 32, [], "--prompt has 32 bytes and the model a block of 32: shorten it to 31"),
        ("x" * 30, ["--max_new_tokens", "3"], "pass max_new_tokens = 2 or less"),
    ],
)
def test_prompts_that_cannot_be_continued(
    saved: Saved, prompt: str, options: list[str], message: str
) -> None:
    result = run(saved.folder, prompt, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_folders_without_a_checkpoint_of_the_main_job(tmp_path: pathlib.Path) -> None:
    result = run(tmp_path / "absent", PROMPT)
    assert result.exit_code == 2
    assert "absent is not a folder: name the --output_dir" in result.stderr
    result = run(tmp_path, PROMPT)
    assert result.exit_code == 2
    assert f"{tmp_path} has no checkpoint: write one with" in result.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_run_of_tokens_is_refused(tmp_path: pathlib.Path) -> None:
    save(tmp_path, text="9 tokens, sha256 0")
    result = run(tmp_path, PROMPT)
    assert result.exit_code == 2
    assert "trained on a tokenizer's tokens" in result.stderr
