"""The models of transformers that zerojax has, by the class that a `config.json` names.

>>> find({"model_type": "gpt2"}).config.__name__
'GPTConfig'
"""

from __future__ import annotations

from typing import Any

from zerojax.models.hugging_face import bart, bert, deberta, decoders, gpt2, t5
from zerojax.models.hugging_face.config_file import Json
from zerojax.models.hugging_face.folder import Format

DOCS = 'docs/models.md, "Bring your own model"'

FORMATS: tuple[Format[Any], ...] = (
    gpt2.FORMAT, gpt2.CLASSIFIER, *decoders.FORMATS, deberta.FORMAT, bart.FORMAT,
    bert.MASKED_LM, bert.CLASSIFIER, t5.FORMAT,
)  # fmt: skip
"""The first format of a model type is used for a `config.json` without `architectures`."""


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
    known = {
        x.architectures[kind]: x for x in FORMATS for kind in x.architectures if kind == model_type
    }
    if not known:
        types = dict.fromkeys(kind for each in FORMATS for kind in each.architectures)
        raise ValueError(
            f"model_type = {model_type!r} is not supported: zerojax has {', '.join(types)}; for "
            f"another model see {DOCS}"
        )
    named = [architecture] if architecture else values.get("architectures") or [*known][:1]
    for name in named:
        if name in known:
            return known[name]
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
    >>> [each.model.__name__ for each in formats_of(config)]
    ['GPT', 'GPT']
    """
    known = [each for each in FORMATS if type(config) is each.config]
    return [x for x in known if getattr(config, "model_type", None) in (None, *x.architectures)]
