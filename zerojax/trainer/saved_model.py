"""Folders of ``save_model``: Hugging Face's names and files where the model is known."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from zerojax.checkpoint import export
from zerojax.checkpoint.naming import Names, Renamed
from zerojax.distributed import log
from zerojax.models.hugging_face.architectures import formats_of
from zerojax.models.hugging_face.config_file import source_folder
from zerojax.weights.names import link
from zerojax.xla.types import PyTree

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "vocab.bpe", "spm.model", "spiece.model",
    "sentencepiece.bpe.model", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of tokenizers and processors in a model's folder."""


def write_model(
    checkpoint: str,
    out: pathlib.Path,
    config: object,
    holders: Sequence[object],
    **options: Any,
) -> str:
    """Writes a checkpoint's parameters and the tokenizer's files; returns the number of tensors.

    Args:
      checkpoint: The folder of the checkpoint.
      out: The folder to write; files of an earlier save are replaced.
      config: The model's config, of any class.
      holders: As for :func:`write_tokenizer`.
      **options: Options of :func:`zerojax.checkpoint.export` in place of the defaults.
    """
    options = {"names": known_names(config), "overwrite": True, **options}
    written = export(checkpoint, out, **options)
    write_tokenizer(out, config, *holders)
    return str(written.tensors)


def known_names(config: object) -> Names | None:
    """Returns Hugging Face's names for models with such a config, for ``checkpoint.export``.

    Parameters that are not those of the config's model keep flax's names, which a warning states.
    None stands for flax's names.
    """
    formats = formats_of(config)
    if not formats:
        return None

    def names(leaves: Mapping[str, tuple[int, ...]], extra: PyTree) -> Renamed:
        errors = []
        for found in formats:
            try:
                renamed = found.export_names(leaves, extra)
                link(renamed.names, {name.replace(".", "/"): x for name, x in leaves.items()})
            except ValueError as error:
                errors.append(error)
            else:
                return renamed
        log.warning(
            "save_model: the parameters do not fit %s, and are saved with flax's names, which "
            "transformers does not know; pass names= (%s)", type(config).__name__, errors[0],
        )  # fmt: skip
        return Renamed(None, {})

    return names


def write_tokenizer(out: pathlib.Path, config: object, *holders: object) -> None:
    """Writes the tokenizer's files beside the weights.

    Args:
      out: The folder of the weights.
      config: The model's config. Files of the folder from which it was read are copied if no holder
        has a tokenizer.
      *holders: Tokenizers or processors of transformers, or objects with a ``tokenizer``, such as
        data collators; the first that can save itself is used.
    """
    for each in holders:
        for holder in (each, getattr(each, "tokenizer", None)):
            if hasattr(holder, "save_pretrained"):
                holder.save_pretrained(str(out))
                return
    source = source_folder(config)
    if source is None or not source.is_dir() or source.resolve() == out.resolve():
        return
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
