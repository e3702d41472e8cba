"""Tokens that transformers' `generate` writes, recorded, so that the tests need no torch.

`python tests/generation/recorded.py` records them where torch and transformers are installed, with
`tests` in PYTHONPATH, in fp32 on a CPU. Both sides draw the same weights by name. Widths and seeds
are such that texts vary, and that rounding does not decide which token is the likeliest.

A test opens a model by `from_folder(folder_of(case, tmp_path))`, feeds it `PROMPTS`, each row by
itself or padded, or `SOURCE` with `MASK` if `is_seq2seq(case)`, and compares with `new_tokens`.
"""

import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from models.recorded_folders import tensors_of
from safetensors.numpy import save_file

FILE = Path(__file__).parent / "data" / "tokens.npz"
VOCABULARY, NEW, BEAMS, LENGTHS = 97, 64, 3, (5, 9, 13)
END = 2  # by config.json; no recorded text of greedy search has it
FILLER = -1  # of recorded tokens after the end
LEAD = 2e-3  # least difference of the two largest logits

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
    _save_weights(case, folder, shapes)
    return folder


def _save_weights(case: str, folder: Path, shapes: dict[str, Any]) -> None:
    tensors = {name: drawn(case, name, tuple(shape)) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compute(case: str) -> dict[str, np.ndarray]:
    """Returns the entries of a case.

    Raises:
      ValueError: A seed does not serve: rounding can change a token, or a text hardly varies.
    """
    import torch
    import transformers

    _, name, values = CASES[case]
    kind = getattr(transformers, name)
    with tempfile.TemporaryDirectory() as folder:
        kind(kind.config_class(**values)).save_pretrained(folder)
        tensors = tensors_of(Path(folder) / "model.safetensors")
        shapes = {key: x.shape for key, x in tensors.items()}
        _save_weights(case, Path(folder), shapes)
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        config = (Path(folder) / "config.json").read_text("utf-8")

    greedy, lead = _write(model, END)
    end = _early_end(greedy)
    found = dict(greedy=greedy, lead=lead, end=np.array(end), ended=_write(model, end)[0])
    for suffix, token in (("", END), ("_ended", end)):
        beams, scores = _write(model, token, num_beams=BEAMS)
        found |= {f"beams{suffix}": beams, f"beams{suffix}_scores": scores}
    _check(model, greedy, lead, found)
    return found | dict(config=np.array(config), shapes=np.array(json.dumps(shapes)))


def _write(model: Any, end: int, num_beams: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Returns the new tokens, and the least lead or the scores of the beams."""
    import torch
    import transformers

    ids = {key: getattr(model.config, key, None) for key in ("bos_token_id", "pad_token_id")}
    start = getattr(model.config, "decoder_start_token_id", None)
    model.generation_config = transformers.GenerationConfig(
        **ids, eos_token_id=end, decoder_start_token_id=start, num_beams=num_beams,
        do_sample=False, max_new_tokens=NEW, output_logits=True, output_scores=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    batches = [(row[None], np.ones_like(row)[None]) for row in PROMPTS]
    is_target = model.config.is_encoder_decoder
    if is_target:
        batches = [(SOURCE, MASK)]
    rows, figures = [], []
    for tokens, mask in batches:
        with torch.no_grad():
            made = model.generate(torch.from_numpy(tokens), attention_mask=torch.from_numpy(mask))
        new = made.sequences.numpy()[:, 1 if is_target else tokens.shape[1] :]
        new = np.pad(new, [(0, 0), (0, NEW - new.shape[1])], constant_values=FILLER)
        after = np.cumsum(new == end, axis=1) - (new == end) > 0
        rows += [*np.where(after, FILLER, new)]
        if num_beams > 1:
            figures += [*made.sequences_scores.numpy()]
        else:
            two = torch.stack(made.logits).topk(2).values
            figures += [float((two[..., 0] - two[..., 1]).min())]
    return np.array(rows), np.array(figures if num_beams > 1 else min(figures), np.float32)


def _early_end(greedy: np.ndarray) -> int:
    """Returns the token that ends one row first, not at once, and leaves out another row."""
    firsts = {
        int(token): [int(np.argmax(row == token)) if token in row else NEW for row in greedy]
        for token in np.unique(greedy)
    }
    serving = {
        token: first for token, first in firsts.items() if min(first) > 7 and max(first) == NEW
    }
    return min(serving, key=lambda token: min(serving[token]))


def _check(model: Any, greedy: np.ndarray, lead: np.ndarray, found: dict[str, Any]) -> None:
    """Checks the texts, and that weights that differ by rounding write the same."""
    import torch

    tails = [row[-32:] for row in greedy]
    periods = [p for p in range(1, 17) for row in tails if (row[p:] == row[:-p]).all()]
    counts = [len(np.unique(row)) for row in greedy]
    if lead < LEAD or periods or min(counts) < 10 or END in greedy:
        raise ValueError(f"lead {lead}, periods {periods}, different tokens {counts}")
    generator = torch.Generator().manual_seed(0)
    original = {name: x.clone() for name, x in model.named_parameters()}
    for _ in range(3):
        with torch.no_grad():
            for name, x in model.named_parameters():
                x.copy_(original[name] * (1 + 3e-6 * torch.randn(x.shape, generator=generator)))
        end = int(found["end"])
        again = {"greedy": _write(model, END)[0], "ended": _write(model, end)[0]}
        again |= {"beams": _write(model, END, BEAMS)[0]}
        again |= {"beams_ended": _write(model, end, BEAMS)[0]}
        for name, tokens in again.items():
            if not np.array_equal(tokens, found[name]):
                raise ValueError(f"{name} changes with rounding")


if __name__ == "__main__":
    import torch
    import transformers

    entries = {f"{case}.{name}": x for case in CASES for name, x in compute(case).items()}
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    np.savez_compressed(FILE, versions=np.array(json.dumps(versions)), **entries)
    print(FILE, FILE.stat().st_size, versions)
