"""Options of a generation: the user's, and for a model of a Hugging Face folder those of its files.

>>> from zerojax.models.gpt import GPT, SIZES, GPTConfig
>>> text = '{"generation_config.json": {"eos_token_id": [2, 3], "do_sample": true, "top_p": 0.9}}'
>>> model = GPT(GPTConfig(**SIZES["tiny"], hugging_face=text))
>>> Options.of(model, max_new_tokens=4).sampling
Sampling(temperature=1.0, top_k=50, top_p=0.9)
>>> Options.of(model, max_new_tokens=4, eos=5, temperature=0).eos
(5,)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.typing import DTypeLike

from zerojax.config.errors import suggestion
from zerojax.distributed import log
from zerojax.generation.beam_search import Search
from zerojax.generation.checks import integer, integers, number
from zerojax.generation.sampling import Sampling
from zerojax.generation.weights import Weights
from zerojax.weights.saver import CONFIG_FILE, GENERATION_FILE

SAME = ("temperature", "top_k", "top_p", "num_beams", "length_penalty", "early_stopping")
"""The options of a folder that have the same names here."""

RENAMED = {"eos_token_id": "eos", "pad_token_id": "pad", "forced_eos_token_id": "forced_eos"}
"""The options that have other names here, by transformers' names."""

THEIRS = {theirs: f"`{ours}`" for theirs, ours in RENAMED.items()} | {
    "input_ids": "`tokens`",
    "attention_mask": "`mask`",
    "max_length": "`max_new_tokens`, which does not count the prompt",
    "do_sample": "`temperature` above 0 with `key`",
    "num_return_sequences": "`tokens` with each prompt repeated",
}
"""The keywords for transformers' names of arguments."""

WITHOUT_COUNTERPART = (
    "bad_words_ids", "begin_suppress_tokens", "constraints", "diversity_penalty", "dola_layers",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff",
    "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
    "forced_decoder_ids", "guidance_scale", "max_time", "min_length", "min_new_tokens", "min_p",
    "no_repeat_ngram_size", "num_beam_groups", "num_return_sequences", "penalty_alpha",
    "remove_invalid_values", "renormalize_logits", "repetition_penalty", "sequence_bias",
    "stop_strings", "suppress_tokens", "top_h", "typical_p", "watermarking_config",
)  # fmt: skip
"""Options of a folder that change tokens of transformers' `generate`, and none of zerojax's."""

_NEUTRAL: tuple[Any, ...] = (None, 0, 1, "", [], {})
_TOP_K = 50  # of transformers, where tokens are drawn


class Options(NamedTuple):
    """Options of a generation.

    Attributes:
      max_new_tokens: The most new tokens of a row.
      sampling: The choice of tokens.
      search: The beam search.
      eos: The tokens that end a row; None for those of the model's config.
      pad: The token after the end of a row; None for the default.
      forced_eos: The tokens of which one is the last of a row that has not ended; none forces none.
      weights, dtype: As for `zerojax.generate`.
    """

    max_new_tokens: int
    sampling: Sampling
    search: Search
    eos: tuple[int, ...] | None
    pad: int | None
    forced_eos: tuple[int, ...]
    weights: Weights | None
    dtype: DTypeLike | None

    @classmethod
    def of(cls, model: object, **given: Any) -> Options:
        """Returns the options for keywords of `zerojax.generate`; None is a keyword not given.

        Raises:
          ValueError: An option is out of range.
          TypeError: A keyword is unknown or missing.
        """
        known = ("max_new_tokens", *SAME, *RENAMED.values(), "weights", "dtype")
        for name in given.keys() - known:
            remedy = f"did you mean {THEIRS[name]}?" if name in THEIRS else None
            remedy = remedy or suggestion(name, (*known, *OTHERS))
            raise TypeError(f"generate: unknown argument {name}: {remedy}")
        given = {name: value for name, value in given.items() if value is not None}
        if "max_new_tokens" not in given:
            raise TypeError("generate: pass max_new_tokens, the most new tokens of each row")
        config = getattr(model, "config", None)
        chosen = {**of_folder(getattr(config, "hugging_face", "")), **given}
        beams = integer("num_beams", chosen.get("num_beams", 1))
        temperature = number("temperature", chosen.get("temperature", 0.0))
        # A folder may have options of draws or beams that it does not use.
        draws = chosen if temperature else given
        top_k, top_p = draws.get("top_k"), draws.get("top_p")
        top_k = None if top_k is None else integer("top_k", top_k)
        top_p = None if top_p is None else number("top_p", top_p)
        search = chosen if beams > 1 else given
        penalty = number("length_penalty", search.get("length_penalty", 1.0))
        early_stopping = search.get("early_stopping", False)
        if beams == 1 and (penalty, early_stopping) != (1, False):
            raise ValueError("length_penalty and early_stopping need num_beams of 2 or more")
        return cls(
            integer("max_new_tokens", given["max_new_tokens"]),
            Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            Search(num_beams=beams, length_penalty=penalty, early_stopping=early_stopping),
            integers("eos", chosen["eos"]) if "eos" in chosen else None,
            integer("pad", chosen["pad"]) if "pad" in chosen else None,
            integers("forced_eos", chosen.get("forced_eos")),
            given.get("weights"),
            given.get("dtype"),
        )


OTHERS = ("key", "mask")
"""The keywords of `zerojax.generate` beside options."""


@functools.lru_cache(maxsize=32)
def of_folder(text: str) -> Mapping[str, Any]:
    """Returns the options of a folder by zerojax's names; logs once what has no counterpart.

    They are those of `generation_config.json`, or without one of `config.json`.

    Args:
      text: The files' contents as JSON, by name: the field `hugging_face` of a model's config.
    """
    files = json.loads(text or "{}")
    file = GENERATION_FILE if GENERATION_FILE in files else CONFIG_FILE
    values = files.get(file, {})
    matters = {key: values[key] for key in WITHOUT_COUNTERPART if values.get(key) not in _NEUTRAL}
    matters |= {key: x for key, x in values.items() if key in WITHOUT_COUNTERPART and x is True}
    if values.get("forced_bos_token_id") is not None:  # a token may be 0
        matters["forced_bos_token_id"] = values["forced_bos_token_id"]
    if matters:
        left_out = ", ".join(f"{key} = {value!r}" for key, value in matters.items())
        log.warning(
            "generate: %s has %s, which zerojax.generate does not support; transformers' tokens "
            "may differ.", file, left_out,
        )  # fmt: skip
    values = {key: value for key, value in values.items() if value is not None}
    found = {RENAMED.get(key, key): values[key] for key in (*SAME, *RENAMED) if key in values}
    if found.get("pad", 0) < 0:
        del found["pad"]
    if not values.get("do_sample"):
        found.pop("temperature", None)
    else:
        found = {"temperature": 1.0, "top_k": _TOP_K, **found}
    if found.get("top_k") == 0:
        del found["top_k"]
    return found
