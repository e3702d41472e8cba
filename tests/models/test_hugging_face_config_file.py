"""What came from a Hugging Face folder goes back to one: token ids, names of labels, generation."""

import dataclasses
import json
import pathlib
from types import ModuleType
from typing import Any

import jax
import pytest

from zerojax.models.hugging_face import bart, deberta, gpt2, llama
from zerojax.models.hugging_face.folder import abstract
from zerojax.trainer.run_folder import model_fields

pytestmark = pytest.mark.usefixtures("quick_compile")

# Keys of each model's page, at small sizes.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128009], "hidden_act": "silu",
    "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
    "max_position_embeddings": 64, "model_type": "llama", "num_attention_heads": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
SMALL_GPT2 = {
    "model_type": "gpt2", "vocab_size": 96, "n_positions": 32, "n_ctx": 32, "n_embd": 16,
    "n_head": 2, "n_layer": 1, "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 4,
    "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "task_specific_params": {"text-generation": {"max_length": 50}},
}  # fmt: skip
DEBERTA = {
    "model_type": "deberta-v2", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32,
    "pad_token_id": 5, "id2label": {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"},
    "label2id": {"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2}, "problem_type": "single",
    "relative_attention": True, "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm",
}  # fmt: skip
BLENDERBOT = {
    "model_type": "blenderbot", "vocab_size": 96, "d_model": 32, "encoder_layers": 1,
    "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
    "forced_eos_token_id": 2, "encoder_no_repeat_ngram_size": 3, "num_beams": 10,
    "length_penalty": 0.65, "min_length": 20, "torch_dtype": "float16",
}  # fmt: skip
GENERATION = {"do_sample": True, "eos_token_id": [2, 7], "temperature": 0.6, "max_length": 60}
MODELS = [(llama, LLAMA3), (gpt2, SMALL_GPT2), (deberta, DEBERTA), (bart, BLENDERBOT)]
WRITTEN = {  # in words of their own, or of the new files
    "torch_dtype": None, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip


def folder_of(values: dict[str, Any], folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def leaves_of(module: ModuleType, config: Any) -> dict[str, tuple[int, ...]]:
    shapes = abstract(module.FORMAT.model(config), *module.FORMAT.inputs)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): x.shape
        for path, x in jax.tree_util.tree_leaves_with_path(shapes)
    }


@pytest.mark.parametrize(("module", "values"), MODELS, ids=lambda x: getattr(x, "__name__", ""))
def test_what_came_from_a_folder_goes_back(
    module: Any, values: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    config = module.read_config(folder_of(values, tmp_path / "in"))
    expected = {k: v for k, v in ({**values, **WRITTEN}).items() if k in values and v is not None}
    about = module.config_to_hf(config)
    assert {k: about.get(k) for k in expected} == expected
    assert "torch_dtype" not in about
    assert module.config_from_hf(about) == config
    # As a Trainer's checkpoint has it, in words of JSON.
    model = json.loads(json.dumps(model_fields(config)))
    renamed = module.export_names(leaves_of(module, config), {"model": model})
    assert json.loads(renamed.texts["config.json"]) == json.loads(json.dumps(about))
    assert json.loads(renamed.texts["generation_config.json"]) == GENERATION
    # A change of one's own counts.
    again = dataclasses.replace(config, vocab_size=config.vocab_size + 8, remat=True)
    assert module.config_to_hf(again) == about | {"vocab_size": config.vocab_size + 8}
    assert hash(again) == hash(dataclasses.replace(again, hugging_face=""))


def test_names_of_labels_are_kept_while_they_are_as_many() -> None:
    config = deberta.config_from_hf(DEBERTA)
    assert deberta.config_to_hf(config)["id2label"] == DEBERTA["id2label"]
    two = deberta.config_to_hf(dataclasses.replace(config, num_labels=2))
    assert two["num_labels"] == 2
    assert two.keys().isdisjoint(("id2label", "label2id"))
    unnamed = deberta.config_from_hf({**DEBERTA, "id2label": None, "num_labels": 3})
    assert deberta.config_to_hf(unnamed)["num_labels"] == 3


def test_a_generation_config_that_is_none_is_named(tmp_path: pathlib.Path) -> None:
    folder = folder_of(SMALL_GPT2, tmp_path / "in")
    (folder / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config.json: not JSON"):
        gpt2.read_config(folder)
