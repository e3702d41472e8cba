"""`from_folder` finds a folder's model, loads it where the plan puts it, and writes it back."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.models import from_folder
from zerojax.models.deberta import SIZES, Deberta, DebertaClassifier, DebertaConfig
from zerojax.models.hugging_face import deberta, gpt2
from zerojax.models.hugging_face.architectures import FORMATS, find
from zerojax.models.hugging_face.folder import abstract

pytestmark = pytest.mark.usefixtures("quick_compile")


def filled(model: Any) -> Any:
    """Returns drawn parameters."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), abstract(model)
    )


def test_every_format_is_found() -> None:
    for format in FORMATS:
        for model_type, name in format.architectures.items():
            assert find({"model_type": model_type, "architectures": [name]}) is format


@pytest.mark.slow
def test_parameters_are_created_where_the_plan_puts_them(tmp_path: Path) -> None:
    config = gpt2.GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=32)
    fresh = filled(gpt2.GPT(config))
    gpt2.save(fresh, config, tmp_path)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    loaded = from_folder(tmp_path, zero=zero, scan=True)
    assert loaded.model.config.scan
    assert not any(x.sharding.is_fully_replicated for x in jax.tree.leaves(loaded.parameters))
    kernel = loaded.parameters["h"]["mlp"]["c_fc"]["kernel"]
    np.testing.assert_array_equal(kernel[0], fresh["h_0"]["mlp"]["c_fc"]["kernel"])
    loaded.save(tmp_path / "again", loaded.parameters)
    again = from_folder(tmp_path / "again", dtype=jnp.bfloat16)
    assert again.parameters["wte"]["embedding"].dtype == jnp.bfloat16
    assert from_folder(tmp_path, parameters=False).parameters is None
    jax.tree.map(np.testing.assert_array_equal, again.load(fresh), fresh)


@pytest.mark.slow
def test_a_head_without_tensors_is_new(tmp_path: Path) -> None:
    zero = zerojax.zero(stage=2)
    config = DebertaConfig(**SIZES["deberta-tiny"])
    body = filled(Deberta(config))
    values = deberta.config_to_hf(config) | {"architectures": ["DebertaV2ForMaskedLM"]}
    zerojax.weights.save(tmp_path, {"deberta": body}, deberta.names(config), config=values)
    with pytest.raises(ValueError, match="DebertaV2ForMaskedLM of model_type 'deberta-v2' is not"):
        from_folder(tmp_path)
    asked: Any = dict(architecture="DebertaV2ForSequenceClassification", num_labels=5, zero=zero)
    params = from_folder(tmp_path, **asked).parameters
    jax.tree.map(np.testing.assert_array_equal, params["deberta"], body)
    assert params["classifier"]["kernel"].shape == (config.hidden_size, 5)
    assert float(jnp.std(params["classifier"]["kernel"])) > 0
    other = from_folder(tmp_path, **asked, key=jax.random.key(7)).parameters
    assert (other["classifier"]["kernel"] != params["classifier"]["kernel"]).any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            r"model_type = 'whisper' is not supported: zerojax has gpt2, .* deberta-v2, bart, .*"
            r'docs/models.md, "Bring your own model"',
        ),
        ({"n_embd": 8}, "model_type = None is not supported"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "config.json: activation_function"),
        (
            {"model_type": "gpt2", "quantization_config": {"quantization_status": "compressed"}},
            "config.json: .* the weights are codes, and zerojax loads floats: pass the folder",
        ),
    ],
)
def test_what_is_not_supported_is_named(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        from_folder(tmp_path)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        from_folder(tmp_path)


@pytest.mark.slow
def test_a_head_of_other_labels_is_new(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DebertaConfig(**SIZES["deberta-tiny"], num_labels=3)
    fresh = filled(DebertaClassifier(config))
    zerojax.weights.save(
        tmp_path, fresh, deberta.names(config), config=deberta.config_to_hf(config)
    )
    with pytest.raises(ValueError, match=r"classifier.weight \[3, 32\], not \[2, 32\].*for a new"):
        from_folder(tmp_path, num_labels=2)
    loaded = from_folder(tmp_path, num_labels=2, ignore_mismatched_sizes=True)
    (record,) = (x for x in caplog.records if "are new" in x.getMessage())
    assert "classifier.bias [3], not [2]" in record.getMessage()
    params = loaded.parameters
    for name in ("deberta", "pooler"):
        jax.tree.map(np.testing.assert_array_equal, params[name], fresh[name])
    assert params["classifier"]["kernel"].shape == (config.hidden_size, 2)
    assert float(jnp.std(params["classifier"]["kernel"])) > 0
    loaded.save(tmp_path / "tuned", params)
    written = json.loads((tmp_path / "tuned/config.json").read_text())
    assert written["num_labels"] == 2
    assert "id2label" not in written  # transformers then names the labels LABEL_0 and LABEL_1


@pytest.mark.slow
def test_its_step_is_that_of_plain_jit(tmp_path: Path) -> None:
    config = gpt2.GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=32)
    gpt2.save(filled(gpt2.GPT(config)), config, tmp_path)
    rng = np.random.default_rng(0)
    tokens = rng.integers(60, size=(16, 8))
    batch = {
        "input_ids": tokens,
        "labels": np.where(rng.random((16, 8)) < 0.3, -100, tokens),
        "attention_mask": np.arange(8) >= np.arange(16)[:, None] % 8,  # padding on the left
    }

    plain, tx = from_folder(tmp_path), optax.sgd(0.1)
    state = TrainState.create(apply_fn=None, params=plain.parameters, tx=tx)
    expected, loss = jax.jit(plain.train_step)(state, jax.tree.map(jnp.asarray, batch))

    zero = zerojax.zero(stage=2, gradient_accumulation_steps=2, train_batch_size=16)
    loaded = from_folder(tmp_path, zero=zero, parameters=False)
    state, ours = zero(loaded.train_step)(loaded.create_state(zero, tx), batch)
    np.testing.assert_allclose(ours, loss, rtol=1e-6)
    for x, y in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    assert zero.evaluate(loaded.eval_step)(state, batch)["loss"] < loss


def test_an_optimizer_that_starts_from_parameters_has_the_folders(tmp_path: Path) -> None:
    config = gpt2.GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=2, n_embd=32)
    gpt2.save(filled(gpt2.GPT(config)), config, tmp_path)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    loaded = from_folder(tmp_path, zero=zero, parameters=False)
    state = loaded.create_state(zero, optax.contrib.schedule_free_sgd(0.1))
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.z, state.params)
    assert float(jnp.std(state.params["wte"]["embedding"])) > 0
