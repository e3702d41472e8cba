"""Hugging Face's `bert` and `roberta`: their `config.json` and tensor names.

>>> config = MASKED_LM.from_hf({"model_type": "roberta", "hidden_size": 24})
>>> config.num_hidden_layers, config.pad_token_id        # as in RobertaConfig if a key is missing
(12, 1)
"""

import dataclasses

from zerojax.models.bert import SIZES, BertClassifier, BertConfig, BertMaskedLM
from zerojax.models.hugging_face import config_file
from zerojax.models.hugging_face.folder import Format
from zerojax.models.hugging_face.module_names import module_names
from zerojax.models.losses import classification_loss
from zerojax.weights import Names, Tensor

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


CLASSIFIER = Format(
    config=BertConfig,
    architectures={
        "bert": "BertForSequenceClassification",
        "roberta": "RobertaForSequenceClassification",
    },
    kinds={
        "bert": {},
        "roberta": {"model_type": "roberta", "vocab_size": 50265, "pad_token_id": 1},
    },
    keys=config_file.same_keys(BertConfig, SIZES["bert-base"]),
    supported={
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
    has_labels=True,
    names=classifier_names,
    model=BertClassifier,
    loss=classification_loss,
    head=("pooler/{rest:path}", "classifier/{rest:path}"),
)
MASKED_LM = dataclasses.replace(
    CLASSIFIER,
    architectures={"bert": "BertForMaskedLM", "roberta": "RobertaForMaskedLM"},
    names=masked_lm_names,
    model=BertMaskedLM,
    head=(),
)
