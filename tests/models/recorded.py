"""What transformers computes for small DeBERTas and BARTs, recorded: the tests need no torch.

This file wrote it at the tag `before-the-cut` (commit 7c474e67), with transformers 5.23.0 and torch
2.15.0 on a CPU, in fp32. Weights and inputs are drawn, so that both sides draw the same.
"""

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data" / "transformers.npz"

# As in a config.json.
DEBERTA: dict[str, dict[str, Any]] = {
    "xlarge": dict(
        model_type="deberta-v2", vocab_size=61, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=32,
        relative_attention=True, position_buckets=8, pos_att_type="p2c|c2p", share_att_key=True,
        norm_rel_ebd="layer_norm", conv_kernel_size=3, conv_act="gelu",
        position_biased_input=False, num_labels=3,
    ),
    "other": dict(
        model_type="deberta-v2", vocab_size=61, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=48, max_position_embeddings=24,
        relative_attention=True, max_relative_positions=9, pos_att_type=["c2p"],
        type_vocab_size=2, layer_norm_eps=1e-5,
    ),
}  # fmt: skip
_SIZES: dict[str, Any] = dict(
    vocab_size=37, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40, max_position_embeddings=24,
)  # fmt: skip
BART: dict[str, dict[str, Any]] = {
    "bart": dict(
        model_type="bart", **_SIZES, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, scale_embedding=False,
    ),
    "blenderbot": dict(
        model_type="blenderbot", **_SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, scale_embedding=True,
    ),
}  # fmt: skip

# Arguments of transformers' generate; `forced_eos_token_id` is `forced_eos` of ours.
SEARCHES: tuple[dict[str, Any], ...] = (
    dict(num_beams=4, max_length=16),
    dict(num_beams=3, max_length=16, min_length=7, length_penalty=2.0, early_stopping=True),
    dict(num_beams=4, max_length=10, length_penalty=-0.5, early_stopping="never"),
    dict(num_beams=2, max_length=9, length_penalty=0.65, forced_eos_token_id=2),
    dict(num_beams=1, max_length=16),
)  # fmt: skip


# Of what `drawn` draws.
WIDTHS = {
    ("bart", "positions"): 3.0,
    ("bart", "blocks"): 0.1,
    ("blenderbot", "positions"): 4.0,
    ("blenderbot", "blocks"): 0.2,
}


def drawn(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor: wide enough that no part of a model is without effect; the norms around 1.

    Positions weigh more than tokens, and the end more than any other: else the likeliest target is
    one token again and again.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "norm" in name.lower():
        return (0.05 * rng.standard_normal(shape) + name.endswith("weight")).astype(np.float32)
    place = "positions" if "embed_positions" in name else "blocks" if "layers" in name else ""
    width = WIDTHS.get((model, place), 0.25)
    tensor = (width * rng.standard_normal(shape)).astype(np.float32)
    if name == "final_logits_bias":
        tensor[0, 2] += 1
    return tensor


def rows(vocabulary: int, tokens: int, lengths: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int [B, T] from 3 on, and their mask: each row is filled up behind its length."""
    rng = np.random.default_rng(tokens)
    mask = np.arange(tokens) < np.array(lengths)[:, None]
    return rng.integers(3, vocabulary, mask.shape) * mask, mask.astype(np.int64)


TEXT, TEXT_MASK = rows(61, 22, (22, 9, 15))
TYPES = np.arange(22) % 5 // 3 * TEXT_MASK
SOURCE, SOURCE_MASK = rows(37, 11, (11, 4, 8, 1))
TARGET, TARGET_MASK = rows(37, 9, (9, 6, 9, 3))


def dtypes(program: str, operation: str) -> set[str]:
    """Float dtypes of the results of an operation, by the text of a jaxpr."""
    made = re.findall(rf":(\w+)\[[\d,]*\] = {operation}\b", program)
    return set(made) & {"f32", "bf16", "f16"}
