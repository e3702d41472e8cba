"""Hugging Face's `bert` and `roberta`: their `config.json` and tensor names.

>>> config = config_from_hf({"model_type": "roberta", "hidden_size": 64, "num_attention_heads": 4})
>>> config.num_hidden_layers, config.pad_token_id        # as in RobertaConfig if a key is missing
(12, 1)
"""

from functools import partial

from zerojax.models.bert import SIZES, BertClassifier, BertConfig, BertMaskedLM
from zerojax.models.config import Fields
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.config_file import Json, Supported, check_supported
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import classification_loss
from zerojax.weights import Names, Tensor

# Values that zerojax.models.bert supports; the first of each is transformers' default.
SUPPORTED: Supported = {
    "model_type": ("bert", "roberta"),
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}

KEYS = config_file.same_keys(BertConfig, SIZES["bert-base"])
_ROBERTA: Fields = dict(model_type="roberta", vocab_size=50265, pad_token_id=1)
"""transformers' defaults of a RoBERTa that differ from those of a BERT."""

# The heads' tensors, by model type: the dense layer, the norm and the bias of masked tokens, and
# the two layers of the classifier.
_MASKED_LM = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls."
             "predictions"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
}  # fmt: skip
_CLASSIFIER = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
}


# Google's files, such as google-bert/bert-base-uncased, have TensorFlow's names of the norms.
_ALIASES = {
    "{norm:path}.LayerNorm.gamma": "{norm}.LayerNorm.weight",
    "{norm:path}.LayerNorm.beta": "{norm}.LayerNorm.bias",
}


def masked_lm_names(config: BertConfig) -> Names:
    """Maps paths of a `BertMaskedLM` to tensors of a `BertForMaskedLM` or `RobertaForMaskedLM`."""
    body = config.model_type
    transform, norm, head = _MASKED_LM[body]
    tensors = {
        **_dense("transform", transform),
        "LayerNorm/scale": Tensor(f"{norm}.weight"),
        "LayerNorm/bias": Tensor(f"{norm}.bias"),
        "bias": Tensor(f"{head}.bias"),
    }
    ignored = [f"{body}.pooler.{{rest:path}}", "cls.seq_relationship.{rest:path}"]
    tied = {
        f"{head}.decoder.weight": f"{body}.embeddings.word_embeddings.weight",
        f"{head}.decoder.bias": f"{head}.bias",
    }
    return _names(config, tensors, ignored, tied)


def classifier_names(config: BertConfig) -> Names:
    """Maps paths of a `BertClassifier` to tensors of transformers' `...ForSequenceClassification`.

    Tensors of the pretraining heads are ignored.
    """
    pooler, classifier = _CLASSIFIER[config.model_type]
    tensors = {**_dense("pooler", pooler), **_dense("classifier", classifier)}
    ignored = ["cls.{rest:path}", "lm_head.{rest:path}"]
    if config.model_type == "roberta":
        ignored.append("roberta.pooler.{rest:path}")
    return _names(config, tensors, ignored, {})


def _names(
    config: BertConfig, head: dict[str, Tensor], ignored: list[str], tied: dict[str, str]
) -> Names:
    body = config.model_type
    tensors = head | module_names("", f"{body}/encoder/layer")
    ignored = [*ignored, f"{body}.embeddings.position_ids"]
    return Names(tensors, ignored=ignored, tied=tied, aliases=_ALIASES)


def _dense(path: str, tensor: str) -> dict[str, Tensor]:
    return {
        f"{path}/kernel": Tensor(f"{tensor}.weight", "o i -> i o"),
        f"{path}/bias": Tensor(f"{tensor}.bias"),
    }


def config_from_hf(values: Json) -> BertConfig:
    """Converts a `config.json` to a `BertConfig`; its other keys are written back.

    Raises:
      ValueError: The file has a value that `zerojax.models.bert` does not support.
    """
    check_supported(values, SUPPORTED, "zerojax.models.bert")
    defaults = _ROBERTA if values.get("model_type") == "roberta" else {}
    sizes = defaults | dict(values)
    sizes["num_labels"] = config_file.labels(sizes)
    return BertConfig(**config_file.from_keys(KEYS, sizes), hugging_face=config_file.kept(values))


def config_to_hf(head: str, config: BertConfig) -> Json:
    """Returns the `config.json` for transformers, with the other keys of the original file.

    Args:
      head: The end of the class's name, such as "ForMaskedLM".
      config: The config.
    """
    return {
        **{key: supported[0] for key, supported in SUPPORTED.items()},
        **config_file.with_labels(config_file.carried(config), config.num_labels),
        "architectures": [config.model_type.capitalize() + head],
        **config_file.to_keys(KEYS, config),
    }


CLASSIFIER = Format(
    BertConfig,
    config_from_hf,
    partial(config_to_hf, "ForSequenceClassification"),
    classifier_names,
    model=BertClassifier,
    loss=classification_loss,
    head=("pooler/{rest:path}", "classifier/{rest:path}"),
)
MASKED_LM = Format(
    BertConfig,
    config_from_hf,
    partial(config_to_hf, "ForMaskedLM"),
    masked_lm_names,
    model=BertMaskedLM,
    loss=classification_loss,
)
