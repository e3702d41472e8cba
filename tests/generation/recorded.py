"""Tokens that transformers' `generate` writes, recorded, so that the tests need no torch.

This file wrote them at the tag `before-the-cut` (commit 7c474e67), with torch and transformers, in
fp32 on a CPU. Both sides draw the same weights by name. Widths and seeds are such that texts vary,
and that rounding does not decide which token is the likeliest.

A test opens a model by `from_folder(folder_of(case, tmp_path))`, feeds it `PROMPTS`, each row by
itself or padded, or `SOURCE` with `MASK` if `is_seq2seq(case)`, and compares with `new_tokens`.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).parent / "data" / "tokens.npz"
VOCABULARY, NEW, BEAMS, LENGTHS = 97, 64, 3, (5, 9, 13)
END = 2  # by config.json; no recorded text of greedy search has it
FILLER = -1  # of recorded tokens after the end

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=40, max_position_embeddings=96, pad_token_id=0,
    bos_token_id=1, eos_token_id=END, rms_norm_eps=1e-5,
)  # fmt: skip
_ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=100.0)

# As in a config.json, by transformers' class; the seed of the weights comes first.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt2": (
        3, "GPT2LMHeadModel",
        dict(
            vocab_size=VOCABULARY, n_positions=96, n_embd=32, n_layer=2, n_head=4, bos_token_id=1,
            eos_token_id=END,
        ),
    ),
    "llama3": (
        0, "LlamaForCausalLM",
        _SIZES | dict(
            rope_parameters=dict(
                rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=40,
            ),
        ),
    ),
    "qwen2": (1, "Qwen2ForCausalLM", _SIZES | dict(rope_parameters=_ROPE)),
    "qwen3": (1, "Qwen3ForCausalLM", _SIZES | dict(head_dim=16, rope_parameters=_ROPE)),
    "gemma2": (
        19, "Gemma2ForCausalLM",
        _SIZES | dict(
            head_dim=16, query_pre_attn_scalar=24, sliding_window=8, attn_logit_softcapping=4.0,
            final_logit_softcapping=10.0,
        ),
    ),
    "t5": (
        4, "T5ForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
            relative_attention_num_buckets=8, relative_attention_max_distance=20,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=END,
        ),
    ),
    "bart": (
        2, "BartForConditionalGeneration",
        dict(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=3,
            encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48,
            decoder_ffn_dim=40, max_position_embeddings=96, pad_token_id=1, bos_token_id=0,
            eos_token_id=END, decoder_start_token_id=0, forced_eos_token_id=None,
        ),
    ),
}  # fmt: skip

# Standard deviations of embeddings, of positions (or their bias), and of all others but norms.
_WIDTHS = {"gpt2": (0.25, 0.25, 0.25), "gemma2": (0.1, 0.5, 0.5), "t5": (0.3, 6.0, 0.4)}
_WIDTHS["bart"] = (0.25, 2.0, 0.1)

_rng = np.random.default_rng(3)
PROMPTS = [_rng.integers(3, VOCABULARY, length) for length in LENGTHS]
MASK = (np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]).astype(np.int64)
SOURCE = np.zeros_like(MASK)
SOURCE[MASK == 1] = np.concatenate(PROMPTS)


def is_seq2seq(case: str) -> bool:
    """Returns whether a model reads `SOURCE` and writes a target."""
    return "ConditionalGeneration" in CASES[case][1]


def recorded(case: str, name: str) -> np.ndarray:
    """Returns an entry of the file.

    - "greedy": the first `NEW` tokens of each row, int [3, NEW], without prompt or start token.
    - "ended": the greedy tokens with the end token "end", int []; `FILLER` follows the end.
    - "beams", "beams_ended": the same by beam search with `BEAMS` beams; `END` ends "beams".
      "beams_scores", "beams_ended_scores" are fp32 [3].
    - "lead": the least lead of a token of "greedy" over the next likely one, fp32 [].
    - "config", "shapes": the text of the model's JSON files.
    """
    with np.load(FILE) as file:
        array: np.ndarray = file[f"{case}.{name}"]
    return array


def new_tokens(case: str, name: str, filler: int) -> np.ndarray:
    """Returns recorded tokens int [3, NEW], with `filler` after the end."""
    tokens = recorded(case, name)
    return np.where(tokens == FILLER, filler, tokens)


def drawn(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a tensor; norms that end a branch or the model weigh more where logits are tied."""
    rng = np.random.default_rng([CASES[case][0], zlib.crc32(name.encode())])
    tokens, positions, others = _WIDTHS.get(case, (0.5, 0.5, 0.5))
    if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
        center = 3.0 * ("post_" in name) if case == "gemma2" else 1.0  # whose norms add the 1
        center = 5.0 if case == "t5" and "final" in name else center
        return (0.1 * rng.standard_normal(shape) + center).astype(np.float32)
    width = 0.0 if name == "final_logits_bias" else others  # which is zero in published files
    if "embed_tokens" in name or "shared" in name or "wte" in name:
        width = tokens
    if "positions" in name or "relative" in name or "wpe" in name:
        width = positions
    return (width * rng.standard_normal(shape)).astype(np.float32)


def folder_of(case: str, folder: Path) -> Path:
    """Writes the folder that transformers writes, and returns the folder."""
    shapes = json.loads(str(recorded(case, "shapes")))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(recorded(case, "config")), "utf-8")
    tensors = {name: drawn(case, name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
