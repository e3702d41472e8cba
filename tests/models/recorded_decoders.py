"""Logits, tensor names and config keys of transformers' decoders, recorded for tests without torch.

`python tests/models/recorded_decoders.py` records them where torch and transformers are installed
(transformers 5.24.0 with torch 2.13.0 on a CPU), in fp32. Both sides draw the same weights by name.
"""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data" / "decoders.npz"

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

ROWS = np.random.default_rng(12).integers(3, 29, (2, 12))
ROWS[1, 8:] = 0  # padding


def drawn(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Draws a tensor, wide enough that no part of a model is without effect; norms around 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
    center = float(is_norm and case != "gemma2")  # whose norms add the 1
    width = 0.05 if is_norm else 0.25
    return (width * rng.standard_normal(shape) + center).astype(np.float32)


def compute() -> dict[str, np.ndarray]:
    """Returns the file's content: logits, and JSON texts."""
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.numpy import save_file

    found: dict[str, np.ndarray] = {}
    for case, (name, values) in CASES.items():
        kind = getattr(transformers, name)
        with tempfile.TemporaryDirectory() as folder:
            kind(kind.config_class(**values)).save_pretrained(folder)
            file = Path(folder) / "model.safetensors"
            with safe_open(file, "np") as tensors:
                shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118
            weights = {key: drawn(case, key, tuple(shape)) for key, shape in shapes.items()}
            save_file(weights, file, metadata={"format": "pt"})
            found[f"{case}.logits"] = logits(name, folder)
            found[f"{case}.config"] = np.array((Path(folder) / "config.json").read_text("utf-8"))
        found[f"{case}.shapes"] = np.array(json.dumps(shapes))
    assert torch.get_default_dtype() == torch.float32
    return found


def logits(name: str, folder: str | Path) -> np.ndarray:
    """Returns the logits of a folder's model in transformers."""
    import torch
    import transformers

    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        result: np.ndarray = model(torch.from_numpy(ROWS)).logits.numpy()
    return result


if __name__ == "__main__":
    np.savez_compressed(FILE, **compute())
    print(FILE, FILE.stat().st_size)
