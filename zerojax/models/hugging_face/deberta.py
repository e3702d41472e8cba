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
from zerojax.models.hugging_face.config_file import Json, Supported, check_supported
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import classification_loss
from zerojax.weights import Names

# Values that zerojax.models.deberta supports; the first of each is transformers' default.
SUPPORTED: Supported = {
    "model_type": ("deberta-v2",),
    "hidden_act": ("gelu",),
    "pooler_hidden_act": ("gelu",),
    "pooler_dropout": (0.0,),
    "conv_groups": (1,),
}

# transformers' defaults that differ from DebertaConfig's.
DEFAULTS: Fields = dict(
    vocab_size=128100, hidden_size=1536, num_hidden_layers=24, num_attention_heads=24,
    intermediate_size=6144, position_buckets=-1, share_att_key=False, norm_rel_ebd="none",
    position_biased_input=True, conv_act="tanh",
)  # fmt: skip
KEYS = config_file.same_keys(DebertaConfig, DEFAULTS)

_DERIVED = ("embedding_size", "pooler_hidden_size", "attention_head_size", "cls_dropout")
"""Keys derived from others; transformers also derives them if a file lacks them."""


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


def config_from_hf(values: Json) -> DebertaConfig:
    """Converts a `config.json` to a `DebertaConfig`; `config_to_hf` writes its other keys back.

    Raises:
      ValueError: The file has a value that `zerojax.models.deberta` does not support.
    """
    check_supported(values, SUPPORTED, "zerojax.models.deberta")
    sizes = DEFAULTS | dict(values)
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    dropout = sizes.get("hidden_dropout_prob", DebertaConfig.hidden_dropout_prob)
    derived = dict(zip(_DERIVED, (width, width, width // heads, dropout), strict=True))
    supported = {key: (value, None) for key, value in derived.items()}
    check_supported(values, supported, "zerojax.models.deberta")
    terms = sizes.get("pos_att_type") if sizes.get("relative_attention") else None
    terms = terms.lower().split("|") if isinstance(terms, str) else terms or ()
    norms = sizes["norm_rel_ebd"].lower().split("|")
    sizes |= {
        "pos_att_type": tuple(term.strip() for term in terms),
        "norm_rel_ebd": "layer_norm" if "layer_norm" in map(str.strip, norms) else "none",
        "conv_kernel_size": max(0, sizes.get("conv_kernel_size", 0)),
        "num_labels": config_file.labels(sizes),
    }
    kept = config_file.kept(values, without=_DERIVED)
    return DebertaConfig(**config_file.from_keys(KEYS, sizes), hugging_face=kept)


def config_to_hf(config: DebertaConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    The names of the labels are kept as well, if `num_labels` is unchanged. `scan`, `remat` and
    `dtype` are omitted.
    """
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        **config_file.with_labels(config_file.carried(config), config.num_labels),
        "architectures": ["DebertaV2ForSequenceClassification"],
        **config_file.to_keys(KEYS, config),
        "pos_att_type": list(config.pos_att_type),
        "relative_attention": bool(config.pos_att_type),
    }


FORMAT = Format(
    DebertaConfig,
    config_from_hf,
    config_to_hf,
    names,
    model=DebertaClassifier,
    loss=classification_loss,
    head=("pooler/{rest:path}", "classifier/{rest:path}"),
)
read_config, texts, export_names = FORMAT.read_config, FORMAT.texts, FORMAT.export_names
