"""Conversion between Hugging Face's `config.json` of a GPT-2 and `GPTConfig`.

>>> config = config_from_hf({"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_head": 4})
>>> config.block_size, config.n_layer, config.dropout     # as in `gpt2` where nothing is said
(64, 12, 0.1)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import os
from collections.abc import Mapping
from typing import Any

from zerojax.models.gpt import INIT_STD, LAYER_NORM_EPS, GPTConfig
from zerojax.models.hugging_face import config_file

# GPTConfig's name, Hugging Face's name, and the default of transformers' GPT2Config.
SIZES = (
    ("vocab_size", "vocab_size", 50257),
    ("block_size", "n_positions", 1024),
    ("n_layer", "n_layer", 12),
    ("n_head", "n_head", 12),
    ("n_embd", "n_embd", 768),
)
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DEFAULT_DROPOUT = 0.1

# Values that zerojax.models.gpt supports; the first of each is transformers' default.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of tanh-GELU
    "layer_norm_epsilon": (LAYER_NORM_EPS,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def config_from_hf(values: Mapping[str, Any]) -> GPTConfig:
    """Converts a GPT-2's `config.json` to a `GPTConfig`.

    Keys that do not affect the forward pass (token ids, generation, summaries) are kept for
    `config_to_hf`.

    Raises:
      ValueError: `zerojax.models.gpt` does not support a value, such as another activation.
    """
    config_file.check_supported(values, SUPPORTED, "zerojax.models.gpt")
    sizes = {field: values.get(hf_key, default) for field, hf_key, default in SIZES}
    if values.get("n_inner") not in (None, 4 * sizes["n_embd"]):
        raise ValueError(
            f"n_inner = {values['n_inner']!r} is not supported: zerojax.models.gpt's MLP is "
            f"4 * n_embd = {4 * sizes['n_embd']} wide"
        )
    dropouts = {key: values.get(key, DEFAULT_DROPOUT) for key in DROPOUTS}
    if len(set(dropouts.values())) > 1:
        raise ValueError(
            f"{dropouts} is not supported: zerojax.models.gpt has one dropout rate for all"
        )
    return GPTConfig(
        **sizes, dropout=dropouts["resid_pdrop"], hugging_face=config_file.kept(values)
    )


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.
    """
    end_of_text = 50256  # transformers' default, an error if the vocabulary is smaller
    in_vocabulary = config.vocab_size > end_of_text
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        "initializer_range": INIT_STD,
        "bos_token_id": end_of_text if in_vocabulary else None,
        "eos_token_id": end_of_text if in_vocabulary else None,
        **config_file.carried(config),
        "architectures": ["GPT2LMHeadModel"],
        **{hf_key: getattr(config, field) for field, hf_key, _ in SIZES},
        **{key: config.dropout for key in DROPOUTS},
        "n_inner": None,
    }


def read_config(folder: str | os.PathLike[str]) -> GPTConfig:
    """Reads a folder's `config.json` by `config_from_hf`, and keeps its `generation_config.json`.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
      ValueError: The file is not a JSON object, or `zerojax.models.gpt` does not support the model.
    """
    return config_file.read(folder, config_from_hf)
