"""A DeBERTa and its tokenizer: of a size, from random weights, or from a folder as transformers
writes it.

Example::

    classifier = of_size("deberta-mini", ["It rains.", ...], labels=2, remat=False)
    classifier = of_folder(pathlib.Path("deberta-v2-xlarge"), labels=2, remat=True)
    params = classifier.loaded(state.params, key)            # each device reads its shards
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax

import zerojax
from zerojax.models import Pretrained, from_folder
from zerojax.models.deberta import SIZES, DebertaConfig
from zerojax.models.hugging_face.deberta import config_to_hf, names
from zerojax.models.tokenizer import load_tokenizer

LARGEST_VOCABULARY = 8192  # of a tokenizer that is made here
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]


@dataclasses.dataclass(frozen=True)
class Classifier:
    """What is trained.

    Attributes:
      config: the model's.
      tokenizer: of the `tokenizers` library.
      pretrained: its weights; None for random ones.
    """

    config: DebertaConfig
    tokenizer: Any
    pretrained: Pretrained | None = None

    def loaded(self, params: Any, key: jax.Array) -> Any:
        """Parameters like these with the folder's values; those of a new head are drawn."""
        return params if self.pretrained is None else self.pretrained.load(params, key)

    def save(self, folder: pathlib.Path, params: Any, classes: Mapping[str, int]) -> None:
        """Writes what transformers and `of_folder` read."""
        config = config_to_hf(self.config) | {
            "label2id": dict(classes),
            "id2label": {str(i): label for label, i in classes.items()},
        }
        zerojax.weights.save(folder, params, names(self.config), config=config)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.save(str(folder / "tokenizer.json"))


def of_size(size: str, texts: Iterable[str], labels: int, remat: bool) -> Classifier:
    """Random weights of a size of `SIZES`, and a BPE of the texts."""
    config = DebertaConfig(**SIZES[size], num_labels=labels, scan=True, remat=remat)
    return Classifier(config, _trained(texts, min(config.vocab_size, LARGEST_VOCABULARY)))


def of_folder(
    folder: pathlib.Path, labels: int, remat: bool, other_labels: bool = False
) -> Classifier:
    """The model of a folder: config.json, safetensors, tokenizer.json. A head that has no tensors
    there, as after pretraining, is new; with `other_labels` so is one of another number of labels.
    """
    pretrained = from_folder(
        folder, architecture="DebertaV2ForSequenceClassification", parameters=False,
        ignore_mismatched_sizes=other_labels, scan=True, remat=remat, num_labels=labels,
    )  # fmt: skip
    pretrained.new_head()  # other labels are an error before the rows are encoded
    config = pretrained.model.config
    return Classifier(config, load_tokenizer(folder, vocab_size=config.vocab_size), pretrained)


def _trained(texts: Iterable[str], vocab_size: int) -> Any:
    """A BPE with BERT's `[CLS] first [SEP] second [SEP]`."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    except ImportError:
        raise ImportError("tokenizers is not installed: pip install -e '.[text]'") from None
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        limit_alphabet=vocab_size // 2,
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
