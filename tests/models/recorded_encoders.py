"""Small encoders, and encoder-decoders, of `recorded_folders`, and their inputs."""

from typing import Any

import numpy as np

_SIZES: dict[str, Any] = dict(
    vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=16, type_vocab_size=2,
)  # fmt: skip

_T5: dict[str, Any] = dict(
    vocab_size=30, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=2,
    relative_attention_num_buckets=8, relative_attention_max_distance=10, decoder_start_token_id=0,
)  # fmt: skip

# As in a config.json, by transformers' class.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _SIZES),
    "bert_classifier": ("BertForSequenceClassification", _SIZES | dict(num_labels=3)),
    "roberta": ("RobertaForMaskedLM", _SIZES | dict(layer_norm_eps=1e-5)),
    "roberta_classifier": ("RobertaForSequenceClassification", _SIZES | dict(num_labels=3)),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5_1_1": (
        "T5ForConditionalGeneration",
        _T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
}

# Tensors of published files that transformers leaves out of a new model's.
EXTRA: dict[str, dict[str, list[int]]] = {"t5_1_1": {"lm_head.weight": [30, 16]}}

ROWS = np.random.default_rng(12).integers(3, 29, (2, 12))
LENGTHS = np.array([12, 8])
MASK = (np.arange(12) < LENGTHS[:, None]).astype(np.int64)
TYPES = np.arange(12) % 5 // 3 * MASK


def inputs(case: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns the inputs of a model's call by its name; each model pads with its own token."""
    if case.startswith("t5"):
        target = dict(decoder_input_ids=ROWS[:, 3:], decoder_attention_mask=MASK[:, 3:])
        return dict(logits=dict(input_ids=ROWS * MASK, attention_mask=MASK, **target))
    rows = np.where(MASK == 1, ROWS, 1 if case.startswith("roberta") else 0)
    return dict(logits=dict(input_ids=rows, attention_mask=MASK, token_type_ids=TYPES))
