"""BERT and RoBERTa: new heads, names of tensors, and what they refuse."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.recorded_folders import drawn, folder_of
from safetensors.numpy import save_file

from zerojax.models import from_folder
from zerojax.models.bert import SIZES, BertClassifier, BertConfig

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("case", ["bert", "roberta"])
def test_a_classifier_begins_with_the_pretrained_body(case: str, tmp_path: Path) -> None:
    folder_of(case, tmp_path)
    architecture = f"{case.capitalize()}ForSequenceClassification"
    loaded = from_folder(tmp_path, architecture=architecture, num_labels=5)
    table = loaded.parameters[case]["embeddings"]["word_embeddings"]["embedding"]
    name = f"{case}.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(table, drawn(case, name, (30, 16)))
    assert loaded.parameters["classifier"]["kernel"].shape == (16, 5)


def test_norms_may_have_the_names_of_tensorflow(tmp_path: Path) -> None:
    tensors = folder_of("bert", tmp_path)
    theirs = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    assert theirs.keys() - tensors.keys()
    save_file(theirs, tmp_path / "model.safetensors")
    loaded = from_folder(tmp_path, architecture="BertForSequenceClassification")
    norm = loaded.parameters["bert"]["encoder"]["layer_1"]["output"]["LayerNorm"]
    name = "bert.encoder.layer.1.output.LayerNorm"
    np.testing.assert_array_equal(norm["scale"], tensors[f"{name}.weight"])
    np.testing.assert_array_equal(norm["bias"], tensors[f"{name}.bias"])

    save_file({**theirs, f"{name}.bias": tensors[f"{name}.bias"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}.bias is there twice, as {name}.be.* and {name}"):
        from_folder(tmp_path)


def test_a_row_ends_where_the_positions_of_a_roberta_do() -> None:
    config = BertConfig(**SIZES["bert-tiny"] | dict(model_type="roberta", pad_token_id=1))
    model, key = BertClassifier(config), jax.random.key(0)
    jax.eval_shape(model.init, key, jnp.ones((1, 30), jnp.int32))
    with pytest.raises(ValueError, match="31 tokens in a row, but max_position_embeddings = 32 of"):
        jax.eval_shape(model.init, key, jnp.ones((1, 31), jnp.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "electra"}, "model_type must be 'bert' or 'roberta', not 'electra'"),
        ({"classifier_dropout": 1.0}, "classifier_dropout must be in"),
        ({"hidden_size": 33}, "hidden_size must be a multiple of num_attention_heads = 4"),
    ],
)
def test_config_names_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BertConfig(**SIZES["bert-tiny"] | change)
