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

_VIT: dict[str, Any] = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=12,
    patch_size=4, num_labels=3,
)  # fmt: skip

_WHISPER: dict[str, Any] = dict(
    vocab_size=30, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=20, num_mel_bins=5,
    max_source_positions=7, max_target_positions=10, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[],
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
    "vit": ("ViTForImageClassification", _VIT),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
}

# Tensors of published files that transformers leaves out of a new model's.
EXTRA: dict[str, dict[str, list[int]]] = {"t5_1_1": {"lm_head.weight": [30, 16]}}

ROWS = np.random.default_rng(12).integers(3, 29, (2, 12))
LENGTHS = np.array([12, 8])
MASK = (np.arange(12) < LENGTHS[:, None]).astype(np.int64)
IMAGES = np.random.default_rng(13).standard_normal((2, 3, 12, 12)).astype(np.float32)
SOUND = np.random.default_rng(14).standard_normal((2, 5, 14)).astype(np.float32)
LABELS = np.where(MASK == 1, ROWS, -100)[:, 3:]
SEARCH: dict[str, Any] = dict(num_beams=3, max_length=9, no_repeat_ngram_size=1)
TYPES = np.arange(12) % 5 // 3 * MASK


def inputs(case: str) -> dict[str, dict[str, np.ndarray]]:
    """Returns the inputs of a model's call by its name; each model pads with its own token."""
    if case == "vit":
        return dict(logits=dict(pixel_values=IMAGES))
    if case == "whisper":
        target = np.concatenate([np.ones((2, 1), int), (ROWS * MASK)[:, 3:-1]], axis=1)
        return dict(logits=dict(input_features=SOUND, decoder_input_ids=target))
    if case.startswith("t5"):
        target = dict(decoder_input_ids=ROWS[:, 3:], decoder_attention_mask=MASK[:, 3:])
        return dict(logits=dict(input_ids=ROWS * MASK, attention_mask=MASK, **target))
    rows = np.where(MASK == 1, ROWS, 1 if case.startswith("roberta") else 0)
    return dict(logits=dict(input_ids=rows, attention_mask=MASK, token_type_ids=TYPES))


def whisper_targets(model: Any) -> np.ndarray:
    """Returns Whisper's targets of `SEARCH`, without the prompts and filters of its `generate`."""
    import torch
    from transformers import GenerationConfig, GenerationMixin

    ids = {key: value for key, value in _WHISPER.items() if key.endswith("token_id")}
    model.generation_config = GenerationConfig(**ids)
    found: np.ndarray = GenerationMixin.generate(model, torch.from_numpy(SOUND), **SEARCH).numpy()
    return found
