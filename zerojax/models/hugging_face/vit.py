"""Hugging Face's `vit`: its `config.json` and tensor names.

>>> config = config_from_hf({"model_type": "vit", "hidden_size": 64, "num_attention_heads": 4})
>>> config.num_hidden_layers, config.image_size             # as in ViTConfig if a key is missing
(12, 224)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import jax
import jax.numpy as jnp

from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, Supported, check_supported
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import classification_loss
from zerojax.models.vit import SIZES, ViTClassifier, ViTConfig
from zerojax.weights import Names, Tensor

# Values that zerojax.models.vit supports; the first of each is transformers' default.
SUPPORTED: Supported = {"model_type": ("vit",), "hidden_act": ("gelu",), "qkv_bias": (True,)}

KEYS = config_file.same_keys(ViTConfig, SIZES["vit-base-patch16-224"])


def names(config: ViTConfig) -> Names:
    """Maps paths of a `ViTClassifier` to tensors of a `ViTForImageClassification`.

    The tensors of a `ViTModel` or a pretraining are accepted, too.
    """
    patches = "vit.embeddings.patch_embeddings.projection"
    tensors = {
        "vit/embeddings/patch_embeddings/kernel": Tensor(f"{patches}.weight", "o c h w -> c h w o"),
        "vit/embeddings/patch_embeddings/bias": Tensor(f"{patches}.bias"),
        "vit/embeddings/{parameter}": Tensor("vit.embeddings.{parameter}"),
        **module_names("", "vit/encoder/layer"),
    }
    ignored = ["pooler.{rest:path}", "embeddings.mask_token", "decoder.{rest:path}"]
    return Names(tensors, prefix="vit.", ignored=ignored)


def config_from_hf(values: Json) -> ViTConfig:
    """Converts a `config.json` to a `ViTConfig`; its other keys are written back.

    Raises:
      ValueError: The file has a value that `zerojax.models.vit` does not support.
    """
    check_supported(values, SUPPORTED, "zerojax.models.vit")
    sizes = {**values, "num_labels": config_file.labels(values)}
    return ViTConfig(**config_file.from_keys(KEYS, sizes), hugging_face=config_file.kept(values))


def config_to_hf(config: ViTConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file."""
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        **config_file.with_labels(config_file.carried(config), config.num_labels),
        "architectures": ["ViTForImageClassification"],
        **config_file.to_keys(KEYS, config),
    }


def image(config: ViTConfig) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one image in a batch of one."""
    size = (1, config.num_channels, config.image_size, config.image_size)
    return jax.ShapeDtypeStruct(size, jnp.float32)


FORMAT = Format(
    ViTConfig,
    config_from_hf,
    config_to_hf,
    names,
    model=ViTClassifier,
    loss=classification_loss,
    keys=[*(key for _, key, _ in KEYS), *SUPPORTED],
    inputs=lambda config: (image(config),),
    head=("classifier/{rest:path}",),
)
export_names = FORMAT.export_names
