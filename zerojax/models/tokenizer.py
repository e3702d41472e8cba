"""Tokenizers of the `tokenizers` library: from a model's folder, or GPT-2's from its merges.

    tokenizer = load_tokenizer("deberta-v2-xlarge-mnli/", vocab_size=config.vocab_size)
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    rows = tokenizer.encode_batch([("It rains.", "The street is wet."), ...])
    input_ids = np.array([row.ids for row in rows])                         # [B, 128]
    attention_mask = np.array([row.attention_mask for row in rows])

The extra `text` installs the library: https://huggingface.co/docs/tokenizers.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(folder: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """Loads the `tokenizers.Tokenizer` from a folder's `tokenizer.json`.

    Args:
      folder: The model's folder, or the file itself.
      vocab_size: The model's vocabulary size, to check the tokenizer's ids.

    Raises:
      FileNotFoundError: The folder has no `tokenizer.json`.
      ImportError: `tokenizers` is not installed.
      ValueError: The file does not describe a tokenizer, or ids exceed the model's vocabulary.
    """
    file = Path(folder)
    file = file if file.is_file() else file / "tokenizer.json"
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist. Convert another tokenizer file (spm.model, or vocab.json with "
            "merges.txt) by transformers: AutoTokenizer.from_pretrained(folder, "
            "use_fast=True).save_pretrained(folder)"
        )
    try:
        tokenizer = _library().Tokenizer.from_file(str(file))
    except ImportError:
        raise
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file} is not a tokenizer's file: {error}") from error
    return _checked(tokenizer, vocab_size, str(file))


def gpt2_tokenizer(merges: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """Builds GPT-2's byte-level BPE from only `vocab.bpe`, which is also called `merges.txt`.

    The ids follow from the file: the 256 bytes, printable ones first, the merges in order, then
    `<|endoftext|>`. Source: Radford et al. 2019, and `encoder.json` of GPT-2, which lists the same
    ids.

    Args:
      merges: The file: a line with its version, then two symbols per line.
      vocab_size: The model's vocabulary size, to check the tokenizer's ids.

    Raises:
      FileNotFoundError: The file does not exist.
      ImportError: `tokenizers` is not installed.
      ValueError: A line does not have two known symbols, or ids exceed the model's vocabulary.
    """
    library, file = _library(), Path(merges)
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = dict.fromkeys(sorted(byte_level.alphabet()))  # as GPT-2 numbers the bytes
    pairs = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        pair = tuple(line.split(" "))
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if len(pair) != 2 or not tokens.keys() >= {*pair}:
            raise ValueError(
                f"{file}:{number}: {line!r} does not merge two symbols of earlier lines: pass the "
                "complete vocab.bpe or merges.txt of a GPT-2"
            )
        pairs.append(pair)
        tokens["".join(pair)] = None
    vocabulary = {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _checked(tokenizer, vocab_size, str(file))


def _checked(tokenizer: Tokenizer, vocab_size: int | None, source: str) -> Tokenizer:
    """Returns the tokenizer after checking that its ids are within a model's vocabulary.

    Raises:
      ValueError: Ids exceed the vocabulary.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    token = max(ids, key=ids.__getitem__)
    if vocab_size is not None and ids[token] >= vocab_size:
        beyond = sum(i >= vocab_size for i in ids.values())
        raise ValueError(
            f"{source} does not fit the model: {beyond} ids, up to {ids[token]} ({token!r}), "
            f"are beyond vocab_size = {vocab_size}. Use the tokenizer of the model's folder, "
            f"or vocab_size = {ids[token] + 1} or more"
        )
    return tokenizer


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError:
        raise ImportError("tokenizers is not installed: pip install -e '.[text]'") from None
    return tokenizers
