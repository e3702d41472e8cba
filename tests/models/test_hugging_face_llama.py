"""Hugging Face's Llama: names of older files, checkpoints, and options that are refused."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from models.recorded_folders import folder_of
from safetensors.numpy import save_file

from zerojax.models import from_folder
from zerojax.models.hugging_face.llama import (
    config_from_hf,
    config_to_hf,
)
from zerojax.models.llama import LlamaConfig

TIED = LlamaConfig(
    vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32, n_inner=88, rope_theta=1000.0,
    rms_norm_eps=1e-5, tie_word_embeddings=True,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_older_files_have_no_prefix_and_a_tied_output_may_be_there_twice(tmp_path: Path) -> None:
    tensors = folder_of("llama3", tmp_path)
    expected = from_folder(tmp_path).parameters
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, from_folder(tmp_path).parameters, expected)
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight .* differs from embed_tokens.weight"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_parameters: rope_type = 'default' has no factor"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_type = 'ntk' is not supported: .* longrope"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn' needs factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}},
            "truncate must be True or False, not 0",
        ),
        ({"head_dim": 63}, "must rotate an even number of 63 features"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(values: dict[str, Any], message: str) -> None:
    assert config_from_hf(config_to_hf(TIED)) == TIED
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)
