"""Conversion between Hugging Face's `config.json` of a Llama and `LlamaConfig`.

>>> config = config_from_hf({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2})
>>> config.n_embd, config.n_inner, config.kv_heads          # the rest as where nothing is said
(64, 11008, 4)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import os
from collections.abc import Mapping
from typing import Any

from zerojax.models.gpt import INIT_STD
from zerojax.models.hugging_face import config_file
from zerojax.models.llama import LlamaConfig

# LlamaConfig's name, Hugging Face's name, and the default of transformers' LlamaConfig.
SIZES = (
    ("vocab_size", "vocab_size", 32000),
    ("block_size", "max_position_embeddings", 2048),
    ("n_layer", "num_hidden_layers", 32),
    ("n_head", "num_attention_heads", 32),
    ("n_kv_head", "num_key_value_heads", None),
    ("n_embd", "hidden_size", 4096),
    ("n_inner", "intermediate_size", 11008),
    ("rms_norm_eps", "rms_norm_eps", 1e-6),
    ("tie_word_embeddings", "tie_word_embeddings", False),
)
ROPE_THETA = 10000.0

# Values that zerojax.models.llama supports; the first of each is transformers' default.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0.0,),
    "rope_scaling": (None,),
}


def config_from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """Converts a Llama's `config.json` to a `LlamaConfig`.

    Keys that do not affect the forward pass (token ids, generation) are kept for `config_to_hf`.

    Raises:
      ValueError: `zerojax.models.llama` does not support a value, such as scaled rotations.
    """
    module = "zerojax.models.llama"
    # From transformers 5 on; older files have a separate rope_theta, and rope_scaling for the rest.
    rope = values.get("rope_parameters") or {}
    config_file.check_supported(values, SUPPORTED, module)
    config_file.check_supported(rope, {"rope_type": ("default",)}, module)
    sizes = {field: values.get(hf_key, default) for field, hf_key, default in SIZES}
    if sizes["n_kv_head"] == sizes["n_head"]:
        sizes["n_kv_head"] = None  # LlamaConfig's form
    config = LlamaConfig(
        **sizes,
        rope_theta=rope.get("rope_theta", values.get("rope_theta", ROPE_THETA)),
        hugging_face=config_file.kept(values, without=["head_dim"]),
    )
    if values.get("head_dim") not in (None, config.head_size):
        raise ValueError(
            f"head_dim = {values['head_dim']!r} is not supported: {module} has heads of "
            f"hidden_size / num_attention_heads = {config.head_size}"
        )
    return config


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.
    """
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items() if key != "rope_scaling"},
        "initializer_range": INIT_STD,
        "bos_token_id": 1 if config.vocab_size > 2 else None,
        "eos_token_id": 2 if config.vocab_size > 2 else None,
        **config_file.carried(config),
        "architectures": ["LlamaForCausalLM"],
        **{hf_key: getattr(config, field) for field, hf_key, _ in SIZES},
        "num_key_value_heads": config.kv_heads,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def read_config(folder: str | os.PathLike[str]) -> LlamaConfig:
    """Reads a folder's `config.json` by `config_from_hf`, and keeps its `generation_config.json`.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
      ValueError: The file is not a JSON object, or `zerojax.models.llama` does not support the
        model.
    """
    return config_file.read(folder, config_from_hf)
