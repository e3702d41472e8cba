"""The models of transformers that zerojax has, by the class that a `config.json` names.

>>> find({"model_type": "gpt2"}).config.__name__
'GPTConfig'
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.folder import Format

DOCS = 'docs/models.md, "Bring your own model"'


class Architecture(NamedTuple):
    """A model's class in transformers.

    Attributes:
      model_type: The key `model_type` of its `config.json`.
      format: The module of `zerojax.models.hugging_face` and the name of its `Format`, as
        "module:NAME"; the module is imported when the model is used.
    """

    model_type: str
    format: str

    def load(self) -> Format[Any]:
        """Imports the format."""
        module, name = self.format.split(":")
        found: Format[Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return found


# The first class of a model type is used for a `config.json` without `architectures`.
ARCHITECTURES: dict[str, Architecture] = {
    "GPT2LMHeadModel": Architecture("gpt2", "gpt2:FORMAT"),
    "GPT2ForSequenceClassification": Architecture("gpt2", "gpt2:CLASSIFIER"),
    **{
        f"{prefix}For{head}": Architecture(prefix.lower(), f"decoders:{prefix.upper()}{suffix}")
        for prefix in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Phi3", "Mixtral")
        for head, suffix in (("CausalLM", ""), ("SequenceClassification", "_CLASSIFIER"))
    },
    "DebertaV2ForSequenceClassification": Architecture("deberta-v2", "deberta:FORMAT"),
    "BartForConditionalGeneration": Architecture("bart", "bart:FORMAT"),
    "BlenderbotForConditionalGeneration": Architecture("blenderbot", "bart:FORMAT"),
    "BertForMaskedLM": Architecture("bert", "bert:MASKED_LM"),
    "BertForSequenceClassification": Architecture("bert", "bert:CLASSIFIER"),
    "RobertaForMaskedLM": Architecture("roberta", "bert:MASKED_LM"),
    "RobertaForSequenceClassification": Architecture("roberta", "bert:CLASSIFIER"),
    "T5ForConditionalGeneration": Architecture("t5", "t5:FORMAT"),
}


def find(values: Json, architecture: str | None = None) -> Format[Any]:
    """Returns the format of a `config.json`.

    Args:
      values: The content of the file.
      architecture: The class to build in place of the file's, such as
        "DebertaV2ForSequenceClassification" for the weights of a pretraining.

    Raises:
      ValueError: zerojax has no such model; the message names those that it has.
    """
    model_type = values.get("model_type")
    known = {name: each for name, each in ARCHITECTURES.items() if each.model_type == model_type}
    if not known:
        types = dict.fromkeys(each.model_type for each in ARCHITECTURES.values())
        raise ValueError(
            f"model_type = {model_type!r} is not supported: zerojax has {', '.join(types)}; for "
            f"another model see {DOCS}"
        )
    named = [architecture] if architecture else values.get("architectures") or [*known][:1]
    for name in named:
        if name in known:
            return known[name].load()
    raise ValueError(
        f"{' and '.join(named)} of model_type {model_type!r} is not supported: zerojax has "
        f"{', '.join(known)}. Load one with from_folder(..., "
        f"architecture={next(iter(known))!r}), which initializes a head without tensors; or "
        f"see {DOCS}"
    )


def formats_of(config: object) -> list[Format[Any]]:
    """Returns the formats of models with such a config, one for each head; none if unknown.

    >>> from zerojax.models.gpt import GPTConfig
    >>> config = GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)
    >>> formats_of(config)[0].stack
    'h'
    """
    kind = getattr(config, "model_type", None)
    loaded = [each.load() for each in ARCHITECTURES.values() if kind in (None, each.model_type)]
    return [each for each in loaded if type(config) is each.config]
