"""ViT: new heads, dtypes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.recorded_folders import folder_of
from safetensors.numpy import save_file

from zerojax.models import from_folder
from zerojax.models.hugging_face.vit import config_from_hf
from zerojax.models.vit import SIZES, ViTClassifier, ViTConfig

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_a_classifier_begins_with_a_body_saved_without_a_head(tmp_path: Path) -> None:
    tensors = folder_of("vit", tmp_path)
    body = {
        name.removeprefix("vit."): tensor
        for name, tensor in tensors.items()
        if name.startswith("vit.")
    }
    save_file(body | {"pooler.dense.bias": np.zeros(16)}, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["ViTModel"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    asked: Any = dict(architecture="ViTForImageClassification", num_labels=5)
    params = from_folder(tmp_path, **asked).parameters
    token = params["vit"]["embeddings"]["cls_token"]
    np.testing.assert_array_equal(token, tensors["vit.embeddings.cls_token"])
    assert params["classifier"]["kernel"].shape == (16, 5)


def test_images_of_another_size_are_refused() -> None:
    model = ViTClassifier(ViTConfig(**SIZES["vit-tiny"]))
    with pytest.raises(
        ValueError, match=r"are \[2, 16, 16, 3\], but num_channels and image_size of"
    ):
        jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 16, 16, 3)))


def test_bf16_parameters_compute_in_bf16() -> None:
    model = ViTClassifier(ViTConfig(**SIZES["vit-tiny"]))
    images = jnp.ones((1, 3, 16, 16))
    shapes = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    program = str(jax.make_jaxpr(model.apply)(variables, images))
    products = [line for line in program.splitlines() if "= dot_general" in line]
    assert products
    assert all(":bf16[" in line.split("=")[0] for line in products)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not supported: zerojax.models.vit comput"),
        ({"qkv_bias": False}, "qkv_bias = False is not supported"),
        ({"image_size": [224, 192]}, r"image_size must be a positive int, not \[224, 192\]"),
        ({"image_size": 30}, "ViTConfig.image_size must be a multiple of patch_size = 16, not 30"),
        ({"hidden_size": 33}, "hidden_size = 33 does not divide into num_attention_heads = 12"),
    ],
)
def test_config_names_what_is_wrong(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)
