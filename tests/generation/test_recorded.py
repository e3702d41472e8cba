"""Recorded texts: zerojax writes each, and transformers writes them here."""

import importlib.util
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


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch and transformers are not installed: nothing to compare the recorded with",
)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", recorded.CASES)
def test_the_recorded_is_what_transformers_writes_here(case: str) -> None:
    computed: dict[str, Any] = recorded.compute(case)
    for name, array in computed.items():
        if name not in ("config", "lead"):  # a config has the version
            stored = recorded.recorded(case, name)
            if array.dtype == np.float32:
                np.testing.assert_allclose(array, stored, rtol=1e-4)
            else:
                np.testing.assert_array_equal(array, stored)
