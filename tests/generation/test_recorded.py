"""zerojax writes the texts that transformers wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generation import recorded

import zerojax
from zerojax.models import from_folder

pytestmark = pytest.mark.usefixtures("quick_compile")


def written(case: str, folder: Path, **how: Any) -> np.ndarray:
    """Returns the new tokens of each row, int [3, NEW], with -1 after the end."""
    loaded = from_folder(recorded.folder_of(case, folder), scan=True)
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
    np.testing.assert_array_equal(written(case, tmp_path, eos=end, pad=96), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "name"),
    [("t5", "beams_ended"), ("bart", "beams"), ("gpt2", "beams_ended"), ("llama3", "beams")],
)
def test_beams_are_transformers(case: str, name: str, tmp_path: Path) -> None:
    end = recorded.END if name == "beams" else int(recorded.recorded(case, "end"))
    expected = recorded.new_tokens(case, name, 96)
    found = written(case, tmp_path, eos=end, pad=96, num_beams=recorded.BEAMS)
    np.testing.assert_array_equal(found, expected)
