"""The formats of a model's Hugging Face folder, by the model's config.

>>> from zerojax.models.gpt import GPTConfig
>>> config = GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)
>>> formats_of(config)[0].stack
'h'
"""

from typing import Any

from zerojax.models.hugging_face.architectures import ARCHITECTURES
from zerojax.models.hugging_face.folder import Format

# By the config's class, for those without a field of this name.
MODEL_TYPES = {"GPTConfig": "gpt2", "DebertaConfig": "deberta-v2", "BartConfig": "bart"}


def formats_of(config: object) -> list[Format[Any]]:
    """Returns the formats of models with such a config, which differ in the model's head.

    The list is empty if zerojax knows none.
    """
    model_type = MODEL_TYPES.get(type(config).__name__) or getattr(config, "model_type", None)
    found = [each.load() for each in ARCHITECTURES.values() if each.model_type == model_type]
    return [each for each in found if isinstance(config, each.config)]
