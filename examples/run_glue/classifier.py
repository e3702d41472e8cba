"""A DeBERTa and its tokenizer: of a size, from random weights, or from a folder as transformers
writes it.

Example::

    classifier = of_size("deberta-mini", ["It rains.", ...], labels=2, remat=False)
    classifier = from_folder(pathlib.Path("deberta-v2-xlarge"), labels=2, remat=True)
    params = classifier.loaded(state.params)                 # each device reads its own piece
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from safetensors import safe_open

import zerojax
from zerojax.models.deberta import SIZES, DebertaConfig
from zerojax.models.hugging_face.deberta import config_from_hf, config_to_hf, names
from zerojax.models.tokenizer import load_tokenizer

LARGEST_VOCABULARY = 8192  # of a tokenizer that is made here
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
HEAD = ("pooler", "classifier")


@dataclasses.dataclass(frozen=True)
class Classifier:
    """What is trained.

    Attributes:
      config: the model's.
      tokenizer: of the `tokenizers` library.
      folder: its weights; None for random ones.
      new: modules that take no tensor of the folder.
    """

    config: DebertaConfig
    tokenizer: Any
    folder: pathlib.Path | None = None
    new: tuple[str, ...] = ()

    def loaded(self, params: Any) -> Any:
        """Parameters like these with the folder's values; those of a new head stay as they are."""
        if self.folder is None:
            return params
        known = names(self.config)
        tensors = {**{f"{module}/{{rest:path}}": None for module in self.new}, **known.tensors}
        unread = [f"{module}.{{rest:path}}" for module in self.new]
        known = dataclasses.replace(known, tensors=tensors, ignored=[*known.ignored, *unread])
        return zerojax.weights.load(self.folder, like=params, names=known)

    def save(self, folder: pathlib.Path, params: Any, classes: Mapping[str, int]) -> None:
        """Writes what transformers and `from_folder` read."""
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


def from_folder(
    folder: pathlib.Path, labels: int, remat: bool, other_labels: bool = False
) -> Classifier:
    """The model of a folder: config.json, safetensors, tokenizer.json. A head that has no tensors
    there, as after pretraining, is new; with `other_labels` so is one of another number of labels.
    """
    file = folder / "config.json"
    try:
        values = json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: {error}") from None
    config = dataclasses.replace(config_from_hf(values), scan=True, remat=remat)
    tensors = _tensors(folder)
    new = tuple(m for m in HEAD if not any(name.startswith(f"{m}.") for name in tensors))
    if config.num_labels != labels and other_labels and "classifier" not in new:
        new = (*new, "classifier")
    if "classifier" in new:
        config = dataclasses.replace(config, num_labels=labels)
    elif config.num_labels != labels:
        raise ValueError(
            f"{folder} classifies into {config.num_labels} labels, and the rows have {labels}: "
            "give rows of its labels, or --ignore_mismatched_sizes for a new head"
        )
    tokenizer = load_tokenizer(folder, vocab_size=config.vocab_size)
    return Classifier(config, tokenizer, folder, new)


def _tensors(folder: pathlib.Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return set(json.loads(index.read_text("utf-8"))["weight_map"])
    file = folder / "model.safetensors"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has neither {file.name} nor {index.name}")
    try:
        with safe_open(file, "np") as opened:
            return set(opened.keys())
    except Exception as error:  # safetensors' own class
        raise ValueError(f"{file} is damaged: {error}") from None


def _trained(texts: Iterable[str], vocab_size: int) -> Any:
    """A BPE with BERT's `[CLS] first [SEP] second [SEP]`."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    except ImportError:
        raise ImportError("tokenizers are of the extra: pip install -e '.[text]'") from None
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
