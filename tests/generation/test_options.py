"""Options of a generation: keywords, and what a folder says."""

import json
import logging
from typing import Any

import numpy as np
import pytest
from generation.test_generate import gpt, params_of
from models import recorded
from models.test_bart import CONFIGS, MASK, SOURCE, weights

import zerojax
from zerojax.generation.options import Options
from zerojax.models.bart import Bart
from zerojax.models.hugging_face.bart import config_from_hf

pytestmark = pytest.mark.usefixtures("quick_compile")


def options(generation: Any = None, config: Any = None, **given: Any) -> Options:
    """Returns the options for a model of a folder with these files."""
    files = {"generation_config.json": generation, "config.json": config}
    text = json.dumps({name: values for name, values in files.items() if values is not None})
    return Options.of(gpt(hugging_face=text), max_new_tokens=3, **given)


def test_a_folder_says_the_defaults() -> None:
    assert options().eos is None
    assert options(config={"eos_token_id": 5, "pad_token_id": -1})[3:6] == ((5,), None, ())
    both = options({"eos_token_id": [6, 7], "forced_eos_token_id": 7}, {"eos_token_id": 5})
    assert (both.eos, both.forced_eos) == ((6, 7), (7,))
    off = options({"eos_token_id": 6, "forced_eos_token_id": 6}, eos=(), forced_eos=())
    assert (off.eos, off.forced_eos) == ((), ())

    draws = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert options(draws).sampling == options(temperature=0.6, top_p=0.9, top_k=50).sampling
    assert options(draws, temperature=0).sampling.is_greedy
    assert options(draws | {"top_k": 0}, temperature=0.8).sampling.temperature == 0.8
    assert options(draws | {"do_sample": False}).sampling.is_greedy
    assert options(draws | {"do_sample": False}, temperature=1).sampling.top_p == 0.9

    beams = options({"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}).search
    assert (beams.num_beams, beams.length_penalty, beams.early_stopping) == (4, 2.0, True)
    assert options({"num_beams": 1, "length_penalty": 2.0}).search.length_penalty == 1
    # transformers' default for BARTs without a generation_config.json.
    for values, forced in (({}, (2,)), ({"forced_eos_token_id": None}, ())):
        model = Bart(config_from_hf({"model_type": "bart", **values}))
        assert Options.of(model, max_new_tokens=3).forced_eos == forced


def test_what_a_folder_says_in_vain_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    generation = {"no_repeat_ngram_size": 3, "forced_bos_token_id": 0, "repetition_penalty": 1.0}
    generation |= {"renormalize_logits": True, "max_length": 20, "transformers_version": "5"}
    with caplog.at_level(logging.WARNING, "zerojax"):
        options(generation)
        options(generation)
    (message,) = caplog.messages
    named = ("forced_bos_token_id = 0", "no_repeat_ngram_size = 3", "renormalize_logits = True")
    assert all(each in message for each in named)
    assert "repetition" not in message
    assert "generation_config.json has" in message


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("eos_token_id", "did you mean `eos`?"),
        ("max_length", "did you mean `max_new_tokens`, which does not count"),
        ("do_sample", "did you mean `temperature` above 0 with `key`?"),
        ("num_return_sequences", "did you mean `tokens` with each prompt repeated?"),
        ("attention_mask", "did you mean `mask`?"),
        ("num_beam", "did you mean `num_beams`?"),
        ("weight", "did you mean `weights`?"),
    ],
)
def test_names_of_others_are_answered_with_ours(name: str, remedy: str) -> None:
    for generate in (zerojax.generate, zerojax.generate_stream):
        with pytest.raises(TypeError, match=f"unknown argument {name}: .*{remedy}"):
            generate(gpt(), params_of(gpt()), [[1]], **{name: 5})
    with pytest.raises(TypeError, match="pass max_new_tokens"):
        zerojax.generate(gpt(), params_of(gpt()), [[1]])


def test_a_forced_end_is_the_last_token_of_a_row_that_has_none() -> None:
    out = zerojax.generate(gpt(), params_of(gpt()), [[1, 2], [3]], max_new_tokens=3, forced_eos=7)
    plain = zerojax.generate(gpt(), params_of(gpt()), [[1, 2], [3]], max_new_tokens=3)
    assert (out[0, 4], out[1, 3]) == (7, 7)
    np.testing.assert_array_equal(out[0, :4], plain[0, :4])


@pytest.mark.slow
@pytest.mark.parametrize("search", [0, 3])
def test_the_options_of_a_folder_give_transformers_targets(search: int) -> None:
    config, values = CONFIGS["bart"], dict(recorded.SEARCHES[search])
    length = values.pop("max_length")
    text = json.dumps({"generation_config.json": {"eos_token_id": 2, **values}})
    model = Bart(config.__class__(**{**vars(config), "hugging_face": text}))
    params = weights("bart", config)
    out = zerojax.generate(model, params, SOURCE, mask=MASK, max_new_tokens=length - 1)
    np.testing.assert_array_equal(out, np.load(recorded.FILE)[f"bart.search{search}"])
