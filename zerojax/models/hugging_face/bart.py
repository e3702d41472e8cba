"""Hugging Face's `bart` and `blenderbot`: their `config.json` and tensor names.

>>> config = config_from_hf({"model_type": "blenderbot", "d_model": 64, "decoder_layers": 3})
>>> config.encoder_layers, config.normalize_before   # as in BlenderbotConfig if a key is missing
(2, True)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

from zerojax.models.bart import BLENDERBOT, Bart, BartConfig
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json
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

# transformers' defaults; a file that does not say otherwise forces the end of a text.
_BART: Json = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12,
    encoder_attention_heads=16, decoder_attention_heads=16, encoder_ffn_dim=4096,
    decoder_ffn_dim=4096, max_position_embeddings=1024, forced_eos_token_id=2,
)  # fmt: skip
_BLENDERBOT: Json = BLENDERBOT | dict(
    vocab_size=8008, d_model=2560, encoder_layers=2, decoder_layers=24,
    encoder_attention_heads=32, decoder_attention_heads=32, encoder_ffn_dim=10240,
    decoder_ffn_dim=10240, max_position_embeddings=128, scale_embedding=False,
    forced_eos_token_id=2,
)  # fmt: skip
FLAGS = ("normalize_before", "normalize_embedding", "add_final_layer_norm", "position_offset")
"""Options that a model type decides, and that no file has."""


def names(config: BartConfig) -> Names:
    """Maps paths of a `Bart` to tensors of a `BartForConditionalGeneration`, or Blenderbot's.

    Files have a `final_logits_bias`, usually of zeros; if it is nonzero, set `add_logits_bias`.
    """
    stacks = ("encoder/layers", "decoder/layers")
    return Names(
        {
            "final_logits_{bias}": Tensor("final_logits_{bias}"),
            **module_names("model.", *stacks),
        },
        ignored=() if config.add_logits_bias else ("final_logits_bias",),
        tied=TIED,
    )


def _flags(values: Json, fields: Fields) -> Fields:
    """Rejects options of another model type."""
    kind = BLENDERBOT if values.get("model_type") == "blenderbot" else {}
    flags = {flag: [kind.get(flag, getattr(BartConfig, flag))] for flag in FLAGS}
    config_file.check_supported(fields, flags, BartConfig.__module__)
    return {}


FORMAT = Format(
    config=BartConfig,
    architectures={
        "bart": "BartForConditionalGeneration",
        "blenderbot": "BlenderbotForConditionalGeneration",
    },
    kinds={"bart": _BART, "blenderbot": _BLENDERBOT},
    keys=config_file.same_keys(BartConfig, {}),
    supported={
        "activation_function": ("gelu",),
        "tie_word_embeddings": (True,),
        "is_encoder_decoder": (True,),
        "encoder_layerdrop": (0.0,),
        "decoder_layerdrop": (0.0,),
    },
    read=_flags,
    names=names,
    model=Bart,
    loss=seq2seq_loss,
)
config_from_hf, config_to_hf, read_config = FORMAT.from_hf, FORMAT.to_hf, FORMAT.read_config
texts, export_names = FORMAT.texts, FORMAT.export_names
