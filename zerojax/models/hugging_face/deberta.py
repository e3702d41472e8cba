"""Hugging Face's `deberta-v2`, which includes v3: its `config.json` and tensor names.

>>> config = config_from_hf({"hidden_size": 64, "num_attention_heads": 4})
>>> config.num_hidden_layers, config.pos_att_type   # as in DebertaV2Config if a key is missing
(24, ())
>>> config_from_hf(config_to_hf(config)) == config
True
"""

from zerojax.models.config import Fields
from zerojax.models.deberta import DebertaClassifier, DebertaConfig
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import classification_loss
from zerojax.weights import Names


def names(config: DebertaConfig) -> Names:
    """Maps paths of a `DebertaClassifier` to tensors of a `DebertaV2ForSequenceClassification`.

    Tensors of the pretraining heads are ignored.
    """
    first = 1 if config.conv_kernel_size else 0
    layers = range(first, config.num_hidden_layers)
    ignored = [
        *("lm_predictions.{rest:path}", "mask_predictions.{rest:path}", "cls.{rest:path}"),
        "deberta.embeddings.position_ids",
    ]
    if not config.position_biased_input:
        ignored.append("deberta.embeddings.position_embeddings.weight")
    return Names(module_names("", "deberta/encoder/layer", layers=layers), ignored=ignored)


def _derived(width: int, heads: int, dropout: float) -> Json:
    """Returns the keys that transformers derives from others."""
    return {
        "embedding_size": width,
        "pooler_hidden_size": width,
        "attention_head_size": width // heads,
        "cls_dropout": dropout,
    }


def _read(values: Json, fields: Fields) -> Fields:
    """Returns the terms of the attention, the norm of its positions, and the convolution."""
    width, dropout = fields["hidden_size"], fields["hidden_dropout_prob"]
    derived = _derived(width, fields["num_attention_heads"], dropout)
    supported = {key: (value, None) for key, value in derived.items()}
    config_file.check_supported(values, supported, DebertaConfig.__module__)
    terms = values.get("pos_att_type") if values.get("relative_attention") else None
    terms = terms.lower().split("|") if isinstance(terms, str) else terms or ()
    norms = fields["norm_rel_ebd"].lower().split("|")
    return {
        "pos_att_type": tuple(term.strip() for term in terms),
        "norm_rel_ebd": "layer_norm" if "layer_norm" in map(str.strip, norms) else "none",
        "conv_kernel_size": max(0, fields["conv_kernel_size"]),
    }


def _write(config: DebertaConfig, about: Json) -> Json:
    return {
        "pos_att_type": list(config.pos_att_type),
        "relative_attention": bool(config.pos_att_type),
        **_derived(config.hidden_size, config.num_attention_heads, config.hidden_dropout_prob),
    }


FORMAT = Format(
    config=DebertaConfig,
    architectures={"deberta-v2": "DebertaV2ForSequenceClassification"},
    kinds={
        "deberta-v2": dict(
            vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24,
            intermediate_size=6144, position_buckets=-1, share_att_key=False, norm_rel_ebd="none",
            position_biased_input=True, conv_act="tanh",
        )
    },
    keys=config_file.same_keys(DebertaConfig, {}),
    supported={
        "hidden_act": ("gelu",),
        "pooler_hidden_act": ("gelu",),
        "pooler_dropout": (0.0,),
        "conv_groups": (1,),
    },
    read=_read,
    write=_write,
    has_labels=True,
    names=names,
    model=DebertaClassifier,
    loss=classification_loss,
    head=("pooler/{rest:path}", "classifier/{rest:path}"),
)  # fmt: skip
config_from_hf, config_to_hf, read_config = FORMAT.from_hf, FORMAT.to_hf, FORMAT.read_config
texts, export_names = FORMAT.texts, FORMAT.export_names
