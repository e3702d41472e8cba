"""Hugging Face's `t5`: its `config.json` and tensor names; T5, T5 1.1 and Flan-T5.

>>> config = config_from_hf({"model_type": "t5", "num_layers": 3, "tie_word_embeddings": False})
>>> config.num_decoder_layers, config.d_model                # as in T5Config if a key is missing
(3, 512)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.folder import Format
from zerojax.models.losses import seq2seq_loss
from zerojax.models.t5 import GATED, SIZES, T5, T5Config
from zerojax.weights import Names, Tensor

# Keys that transformers computes from `feed_forward_proj`, and their values.
_DERIVED: dict[str, Json] = {
    "relu": {"dense_act_fn": "relu", "is_gated_act": False},
    GATED: {"dense_act_fn": "gelu_new", "is_gated_act": True},
}

# Modules of a block, and their numbers and names in transformers.
_MODULES = {
    "encoder": {
        "self_attention": ("layer.0", "SelfAttention"),
        "mlp": ("layer.1", "DenseReluDense"),
    },
    "decoder": {
        "self_attention": ("layer.0", "SelfAttention"),
        "cross_attention": ("layer.1", "EncDecAttention"),
        "mlp": ("layer.2", "DenseReluDense"),
    },
}


def names(config: T5Config) -> Names:
    """Maps paths of a `T5` to tensors of a `T5ForConditionalGeneration`."""
    tensors = {"shared/embedding": Tensor("shared.weight")}
    for stack, modules in _MODULES.items():
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        tensors[f"{stack}/relative_attention_bias/embedding"] = Tensor(first)
        tensors[f"{stack}/final_layer_norm/scale"] = Tensor(f"{stack}.final_layer_norm.weight")
        for block, axis in ((f"{stack}/block", "layer "), (f"{stack}/block_{{layer:int}}", "")):
            for module, (number, name) in modules.items():
                layer = f"{stack}.block.{{layer}}.{number}"
                tensors[f"{block}/{module}/{{norm}}/scale"] = Tensor(
                    f"{layer}.{{norm}}.weight", f"... -> {axis}..."
                )
                tensors[f"{block}/{module}/{{dense}}/kernel"] = Tensor(
                    f"{layer}.{name}.{{dense}}.weight", f"o i -> {axis}i o"
                )
    tied = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tie_word_embeddings:
        tied.append("lm_head.weight")
    else:
        tensors["lm_head/kernel"] = Tensor("lm_head.weight", "o i -> i o")
    # Older files have a second table of the decoder, which transformers ignores.
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return Names(tensors, ignored=[unused], tied=dict.fromkeys(tied, "shared.weight"))


def _read(values: Json, fields: Fields) -> Fields:
    """Returns the decoder's number of blocks, and the fields of the head.

    A file without `scale_decoder_outputs` scales unless `tie_word_embeddings` is false. A model
    that does not scale is a T5 1.1, whose head is separate, although transformers 5 writes
    `tie_word_embeddings` as true.
    """
    derived = {key: (value,) for key, value in _DERIVED[fields["feed_forward_proj"]].items()}
    config_file.check_supported(values, derived, T5Config.__module__)
    is_tied = values.get("tie_word_embeddings") is not False
    scales = values.get("scale_decoder_outputs", is_tied)
    return {
        "num_decoder_layers": fields["num_decoder_layers"] or fields["num_layers"],
        "scale_decoder_outputs": scales,
        "tie_word_embeddings": is_tied and scales,
    }


FORMAT = Format(
    config=T5Config,
    architectures={"t5": "T5ForConditionalGeneration"},
    kinds={"t5": {}},
    keys=config_file.same_keys(T5Config, SIZES["t5-small"] | dict(num_decoder_layers=None)),
    supported={
        "feed_forward_proj": [*_DERIVED],
        "is_encoder_decoder": (True,),
        "is_decoder": (False,),
    },
    read=_read,
    write=lambda config, about: _DERIVED[config.feed_forward_proj],
    names=names,
    model=T5,
    loss=seq2seq_loss,
    needed=("tie_word_embeddings", "scale_decoder_outputs", "feed_forward_proj"),
)
config_from_hf, config_to_hf, export_names = FORMAT.from_hf, FORMAT.to_hf, FORMAT.export_names
