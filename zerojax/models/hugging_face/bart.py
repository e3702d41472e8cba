"""Hugging Face's `bart` and `blenderbot`: their `config.json` and tensor names.

>>> config = config_from_hf({"model_type": "blenderbot", "d_model": 64, "decoder_layers": 3})
>>> config.encoder_layers, config.normalize_before   # as in BlenderbotConfig if a key is missing
(2, True)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

from collections.abc import Sequence

from zerojax.models.bart import BLENDERBOT, Bart, BartConfig
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, check_supported
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import seq2seq_loss
from zerojax.weights import Names, Tensor

# Copies of the shared embedding table that older files also have.
TIED = {
    name: "model.shared.weight"
    for name in (
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
}

# Values that zerojax.models.bart supports; the first of each is transformers' default.
SUPPORTED: dict[str, Sequence[object]] = {
    "model_type": ("bart", "blenderbot"),
    "activation_function": ("gelu",),
    "tie_word_embeddings": (True,),
    "encoder_layerdrop": (0.0,),
    "decoder_layerdrop": (0.0,),
}

ARCHITECTURES = {
    "bart": "BartForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
}

# Options that distinguish each model type, and transformers' defaults of its sizes.
_BART: Fields = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12,
    encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4096,
    decoder_ffn_dim=4096, max_position_embeddings=1024,
)  # fmt: skip
_BLENDERBOT = BLENDERBOT | dict(
    vocab_size=8008, d_model=2560, encoder_layers=2, decoder_layers=24,
    encoder_attention_heads=32, decoder_attention_heads=32, encoder_ffn_dim=10240,
    decoder_ffn_dim=10240, max_position_embeddings=128, scale_embedding=False,
)  # fmt: skip
KINDS: dict[str, Fields] = {"bart": _BART, "blenderbot": _BLENDERBOT}
FLAGS = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "position_offset")


def names(config: BartConfig) -> Names:
    """Maps paths of a `Bart` to tensors of a `BartForConditionalGeneration`, or Blenderbot's."""
    stacks = ("encoder/layers", "decoder/layers")
    return Names(
        {
            "final_logits_{bias}": Tensor("final_logits_{bias}"),
            **module_names("model.", *stacks),
        },
        ignored=() if config.add_logits_bias else ("final_logits_bias",),
        tied=TIED,
    )


def config_from_hf(values: Json) -> BartConfig:
    """Converts a `config.json` to a `BartConfig`; `config_to_hf` writes its other keys back.

    Files have a `final_logits_bias`, usually of zeros; if it is nonzero, set `add_logits_bias`.

    Raises:
      ValueError: The file has another `model_type`, or a value that `zerojax.models.bart` does not
        support.
    """
    kind = KINDS.get(values.get("model_type", "bart"), {})
    flags = {flag: [kind.get(flag, getattr(BartConfig, flag))] for flag in FLAGS}
    check_supported(values, SUPPORTED | flags, "zerojax.models.bart")
    fields = config_file.from_keys(config_file.same_keys(BartConfig, kind), values)
    # transformers' default, where the file does not say otherwise.
    return BartConfig(**fields, hugging_face=config_file.kept({"forced_eos_token_id": 2, **values}))


def config_to_hf(config: BartConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    `scan`, `remat` and `dtype` are omitted.

    Raises:
      ValueError: The config is neither BART's nor BlenderBot's.
    """
    given = {flag: getattr(config, flag) for flag in FLAGS}
    for kind, fields in KINDS.items():
        if given == {flag: fields.get(flag, getattr(BartConfig, flag)) for flag in FLAGS}:
            return {
                **config_file.carried(config),
                "architectures": [ARCHITECTURES[kind]],
                **config_file.to_keys(config_file.same_keys(BartConfig, {}), config),
                "model_type": kind,
                "activation_function": "gelu",
                "tie_word_embeddings": True,
                "is_encoder_decoder": True,
            }
    raise ValueError(f"transformers has no such model: {given}; known are {', '.join(KINDS)}")


FORMAT = Format(
    BartConfig,
    config_from_hf,
    config_to_hf,
    names,
    model=Bart,
    loss=seq2seq_loss,
)
read_config, texts, export_names = FORMAT.read_config, FORMAT.texts, FORMAT.export_names
