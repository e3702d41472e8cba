"""The folders of `save_model`: names, configuration and tokenizer of the original model."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from trainer.jobs import CONFIG, TOKENS

import zerojax
from zerojax import Trainer, TrainingArguments
from zerojax.models.bert import BertClassifier, BertConfig, BertMaskedLM
from zerojax.models.gpt import GPT
from zerojax.models.hugging_face.folder import abstract, by_path
from zerojax.models.hugging_face.gpt2 import config_to_hf, load, read_config, save
from zerojax.models.llama import Llama, LlamaConfig
from zerojax.trainer import causal_lm_loss
from zerojax.trainer.saved_model import known_names, write_tokenizer

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = {
    "tokenizer.json": '{"model": {"type": "BPE"}}',
    "special_tokens_map.json": '{"pad_token": "<pad>"}',
    "merges.txt": "a b\n",
}
GENERATION = {"eos_token_id": 3, "pad_token_id": 0, "max_new_tokens": 7}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder as transformers writes it, of a small GPT-2."""
    folder = tmp_path / "source"
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f"), abstract(GPT(CONFIG)))
    save(params, CONFIG, folder)
    config = {**config_to_hf(CONFIG), "eos_token_id": 3, "pad_token_id": 0, "task": "of the file"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for name, text in TOKENIZER.items():
        (folder / name).write_text(text)
    (folder / "README.md").write_text("not copied")
    return folder


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.slow
def test_a_folder_is_written_as_it_was_read(source: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    config = read_config(source)
    trainer = Trainer(
        GPT(config),
        TrainingArguments(str(tmp_path / "run"), max_steps=1, save_strategy="no"),
        train_dataset=TOKENS,
        loss=causal_lm_loss,
        optimizer=optax.sgd(0.1),
        mesh=zerojax.mesh(1),
        params=lambda like: load(source, config, like=like),
    )
    out = trainer.save_model()
    original, written = (load_file(x / "model.safetensors") for x in (source, out))
    assert original.keys() == written.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(tensor, written[name])
    assert {x.name for x in out.iterdir()} == {
        "model.safetensors", "config.json", "generation_config.json", *TOKENIZER
    }  # fmt: skip
    for name, text in TOKENIZER.items():
        assert (out / name).read_text() == text
    assert read_json(out / "config.json") == read_json(source / "config.json")
    assert read_json(out / "generation_config.json") == GENERATION
    # A second save replaces the files of the first, and no others.
    (out / "notes.txt").write_text("kept")
    state = trainer.train_state
    trainer.train_state = state.replace(params=jax.tree.map(lambda x: 2 * x, state.params))
    assert trainer.save_model(max_shard_size="20kB") == out
    assert not (out / "model.safetensors").exists()
    index = read_json(out / "model.safetensors.index.json")
    assert index["weight_map"].keys() == original.keys()
    assert (out / "notes.txt").read_text() == "kept"
    table = load(out, config)["wpe"]["embedding"]
    np.testing.assert_array_equal(table, 2 * original["transformer.wpe.weight"])
    assert {x.name for x in (tmp_path / "run").iterdir()} == {"model"}


def test_parameters_of_another_model_keep_their_names(caplog: pytest.LogCaptureFixture) -> None:
    names: Any = known_names(CONFIG)
    with caplog.at_level(logging.WARNING):
        renamed = names({"head.kernel": (32, 3)}, {"model": vars(CONFIG)})
    assert renamed.names is None
    assert not renamed.texts
    assert "flax's names, which transformers does not know" in caplog.text
    assert known_names(nn.Dense(3)) is None
    assert known_names(None) is None


BERT = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                  intermediate_size=8, max_position_embeddings=4)  # fmt: skip
MISTRAL = LlamaConfig(vocab_size=7, block_size=4, n_layer=1, n_head=2, n_embd=8, n_inner=8,
                      model_type="mistral")  # fmt: skip


@pytest.mark.parametrize(
    ("model", "architecture"),
    [
        (BertClassifier(BERT), "BertForSequenceClassification"),
        (BertMaskedLM(BERT), "BertForMaskedLM"),
        (Llama(MISTRAL), "MistralForCausalLM"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_head_and_the_family_are_found(model: Any, architecture: str) -> None:
    leaves = {name.replace("/", "."): x.shape for name, x in by_path(abstract(model)).items()}
    names: Any = known_names(model.config)
    renamed = names(leaves, {"model": dataclasses.asdict(model.config)})
    assert json.loads(renamed.texts["config.json"])["architectures"] == [architecture]
    assert renamed.names is not None


class Saver:
    """A tokenizer of transformers."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("its own")


class Collator:
    tokenizer = Saver()


def test_a_tokenizer_saves_itself(source: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, read_config(source), None, Collator())
    assert (tmp_path / "tokenizer.json").read_text() == "its own"
    assert not (tmp_path / "merges.txt").exists()
