"""Small decoders of `recorded_folders`, and their inputs."""

from typing import Any

import numpy as np

_SIZES: dict[str, Any] = dict(
    vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=40, max_position_embeddings=16, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5,
)  # fmt: skip


def _rope(kind: str, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **more}}


# As in a config.json, by transformers' class.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "LlamaForCausalLM",
        _SIZES | dict(head_dim=16, tie_word_embeddings=True) | _rope(
            "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=40,
        ),
    ),
    "linear": (
        "LlamaForCausalLM",
        _SIZES | dict(attention_bias=True, mlp_bias=True) | _rope("linear", factor=2.0),
    ),
    "yarn": (
        "Qwen2ForCausalLM",
        _SIZES | _rope("yarn", factor=4.0, original_max_position_embeddings=40),
    ),
    "yarn_mscale": (
        "LlamaForCausalLM",
        _SIZES | dict(head_dim=16) | _rope(
            "yarn", factor=4.0, original_max_position_embeddings=40, beta_fast=4.0, beta_slow=0.1,
            mscale=0.7, mscale_all_dim=1.2, truncate=False,
        ),
    ),
    "dynamic": (
        "LlamaForCausalLM", _SIZES | dict(max_position_embeddings=8) | _rope("dynamic", factor=3.0),
    ),
    "llama_classifier": (
        "LlamaForSequenceClassification", _SIZES | dict(num_labels=3) | _rope("default"),
    ),
    "gpt2_classifier": (
        "GPT2ForSequenceClassification",
        dict(
            vocab_size=30, n_positions=16, n_embd=32, n_layer=2, n_head=4, num_labels=3,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "mistral": ("MistralForCausalLM", _SIZES | dict(sliding_window=5)),
    "qwen2": (
        "Qwen2ForCausalLM",
        _SIZES | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": ("Qwen3ForCausalLM", _SIZES | dict(head_dim=16)),
    "gemma2": (
        "Gemma2ForCausalLM",
        _SIZES | dict(
            head_dim=16, query_pre_attn_scalar=24, sliding_window=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "phi3": (
        "Phi3ForCausalLM",
        _SIZES | dict(original_max_position_embeddings=8, sliding_window=9) | _rope(
            "longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[1.0, 3.0],
        ),
    ),
    "mixtral": ("MixtralForCausalLM", _SIZES | dict(num_local_experts=4)),
}  # fmt: skip

ROWS = np.random.default_rng(12).integers(3, 29, (4, 12))
# No padding; padding on the right; on the left; on the left, between tokens and on the right.
MASK = (np.arange(12) < [[12], [8], [12], [9]]) & (np.arange(12) >= [[0], [0], [4], [1]])
MASK[3, 5] = False
UNMASKED = ("llama3", "gemma2", "gpt2_classifier")  # to be called without a mask, too


def inputs(case: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns the inputs of a model's calls, by the name of the call."""
    mask = MASK.astype(np.int64)
    if case == "gemma2":  # A query without keys differs in transformers' two implementations.
        mask[:, 0] = 1
    calls = dict(logits=dict(input_ids=ROWS * mask, attention_mask=mask))
    return calls | (dict(unmasked=dict(input_ids=ROWS * mask)) if case in UNMASKED else {})
