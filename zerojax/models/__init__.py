"""Models in flax, their Hugging Face files, and the names by which commands find models.

A config and tokens come in; logits or losses come out. Devices and shardings enter a model only
through optional fields. Start with :class:`zerojax.models.gpt.GPT`. In reading order:

- ``config``, ``loss``, ``blocks``: what all models share.
- ``gpt``, ``llama``: decoders. ``encoder_decoder``, with ``bart`` and ``t5``. ``cache``: keys and
  values that all of these keep between tokens. ``encoder``, with ``bert`` and ``deberta``.
- ``layout``, ``tensor_parallel``: activations and parameters over the mesh axes "seq" and "model".
- ``kernels``, ``attention``, ``assumed_attention``: fused layers, and the choice among them.
- ``hugging_face``: weights and configs of transformers, and :func:`from_folder`. ``tokenizer``:
  its tokenizers. ``losses``: losses for the Trainer. ``distillation``: the loss of a teacher.
- ``registry``, ``names``: models by name, for ``zerojax plan``, ``fit`` and ``estimate``.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from zerojax.models.hugging_face.pretrained import Pretrained as Pretrained
    from zerojax.models.hugging_face.pretrained import from_folder as from_folder


def __getattr__(name: str) -> object:
    """Imports :func:`from_folder` on first use, as it needs the loader of weights."""
    if name not in ("from_folder", "Pretrained"):
        raise AttributeError(f"module 'zerojax.models' has no attribute {name!r}")
    return getattr(_import_module("zerojax.models.hugging_face.pretrained"), name)
