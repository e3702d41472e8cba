"""The format of a model's Hugging Face folder, by the model's config.

>>> from zerojax.models.gpt import GPTConfig
>>> format_of(GPTConfig(vocab_size=8, block_size=8, n_layer=1, n_head=1, n_embd=8)).stack
'h'
"""

import importlib
from typing import Any

from zerojax.models.hugging_face.folder import Format

# By the config's class; a format's module is imported when its model is saved.
MODULES = {
    "GPTConfig": "gpt2",
    "LlamaConfig": "llama",
    "DebertaConfig": "deberta",
    "BartConfig": "bart",
    "T5Config": "t5",
    "ViTConfig": "vit",
}


def format_of(config: object) -> Format[Any] | None:
    """Returns the format of models with such a config; None if zerojax knows none."""
    name = MODULES.get(type(config).__name__)
    if name is None:
        return None
    found: Format[Any] = importlib.import_module(f"{__package__}.{name}").FORMAT
    return found if isinstance(config, found.config) else None
