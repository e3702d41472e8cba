"""zerojax writes the texts that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generation import recorded

import zerojax
from zerojax.models import from_folder

pytestmark = pytest.mark.usefixtures("quick_compile")


def written(case: str, folder: Path, end: int | None, **how: Any) -> np.ndarray:
    """Returns the new tokens of each row, int [3, NEW], with 96 after the end.

    A folder without `end` in its `generation_config.json` has the one of its `config.json`.
    """
    how |= dict(pad=96)
    recorded.folder_of(case, folder)
    if end is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    loaded = from_folder(folder, scan=True)
    how = dict(max_new_tokens=recorded.NEW) | how
    if recorded.is_seq2seq(case):
        args: Any = (loaded.model, loaded.parameters, recorded.SOURCE)
        out = np.asarray(zerojax.generate(*args, mask=recorded.MASK, **how))
        start = loaded.model.config.decoder_start_token_id
        assert (out[:, 0] == start).all()
        return out[:, 1:]
    out = np.asarray(zerojax.generate(loaded.model, loaded.parameters, recorded.PROMPTS, **how))
    return np.stack(
        [row[length:][: recorded.NEW] for row, length in zip(out, recorded.LENGTHS, strict=True)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", recorded.CASES)
def test_tokens_are_transformers(case: str, tmp_path: Path) -> None:
    end = int(recorded.recorded(case, "end"))
    expected = recorded.new_tokens(case, "ended", 96)
    np.testing.assert_array_equal(written(case, tmp_path, end), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [("t5", "beams_ended"), ("bart", "beams"), ("gpt2", "beams_ended"), ("llama3", "beams")],
)
def test_beams_are_transformers(case: str, name: str, tmp_path: Path) -> None:
    end = None if name == "beams" else int(recorded.recorded(case, "end"))
    expected = recorded.new_tokens(case, name, 96)
    found = written(case, tmp_path, end, num_beams=recorded.BEAMS)
    np.testing.assert_array_equal(found, expected)
