"""Hugging Face's `whisper`: its `config.json` and tensor names.

>>> config = config_from_hf({"model_type": "whisper", "d_model": 64, "encoder_attention_heads": 4,
...                          "decoder_attention_heads": 4, "max_target_positions": 100})
>>> config.num_mel_bins, config.max_position_embeddings  # as in transformers if a key is missing
(80, 100)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

import jax
import jax.numpy as jnp

from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, Keys, Supported, check_supported
from zerojax.models.hugging_face.folder import TOKEN, Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import seq2seq_loss
from zerojax.models.whisper import OPTIONS, SIZES, Whisper, WhisperConfig
from zerojax.weights import Names, Tensor

# Values that zerojax.models.whisper supports; the first of each is transformers' default.
SUPPORTED: Supported = {
    "model_type": ("whisper",),
    "activation_function": ("gelu",),
    "tie_word_embeddings": (True,),
    "is_encoder_decoder": (True,),
    "apply_spec_augment": (False,),
}

# transformers' defaults: its ids are those of the English vocabulary.
_DEFAULTS = SIZES["whisper-tiny"] | dict(
    pad_token_id=50256, eos_token_id=50256, decoder_start_token_id=50257
)

KEYS: Keys = [
    (field, {"max_position_embeddings": "max_target_positions"}.get(key, key), default)
    for field, key, default in config_file.same_keys(WhisperConfig, _DEFAULTS)
    if field not in OPTIONS
]


def names(config: WhisperConfig) -> Names:
    """Maps paths of a `Whisper` to tensors of a `WhisperForConditionalGeneration`."""
    table = "model.decoder.embed_tokens.weight"
    return Names(
        {
            "shared/embedding": Tensor(table),
            "encoder/{conv}/kernel": Tensor("model.encoder.{conv}.weight", "o i k -> k i o"),
            **module_names("model.", "encoder/layers", "decoder/layers"),
        },
        tied={"proj_out.weight": table},
    )


def config_from_hf(values: Json) -> WhisperConfig:
    """Converts a `config.json` to a `WhisperConfig`; `config_to_hf` writes its other keys back.

    `scale_embedding` is one of them: it has no effect in transformers.

    Raises:
      ValueError: The file has a value that `zerojax.models.whisper` does not support.
    """
    check_supported(values, SUPPORTED, "zerojax.models.whisper")
    fields = config_file.from_keys(KEYS, values)
    return WhisperConfig(**fields, hugging_face=config_file.kept(values))


def config_to_hf(config: WhisperConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.
    """
    return {
        **config_file.carried(config),
        "architectures": ["WhisperForConditionalGeneration"],
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        **config_file.to_keys(KEYS, config),
    }


def sound(config: WhisperConfig) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one spectrogram in a batch of one."""
    size = (1, config.num_mel_bins, 2 * config.max_source_positions)
    return jax.ShapeDtypeStruct(size, jnp.float32)


FORMAT = Format(
    WhisperConfig,
    config_from_hf,
    config_to_hf,
    names,
    model=Whisper,
    loss=seq2seq_loss,
    keys=[*(key for _, key, _ in KEYS), *SUPPORTED],
    inputs=lambda config: (sound(config), TOKEN),
)
export_names = FORMAT.export_names
