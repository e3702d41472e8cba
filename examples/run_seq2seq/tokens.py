"""Pairs as rows of tokens, of one length, filled up.

Example::

    tokenizer = trained(texts, model.config)
    rows = encoded(tokenizer, pairs, model.config, source=128, target=64)
    rows["input_ids"].shape, rows["labels"].shape                # (len(pairs), 24), (.., 32)
    texts_of(tokenizer, targets, model.config)
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

import zerojax
from examples.run_seq2seq.pairs import Pair
from zerojax.models.bart import BartConfig

Rows = dict[str, npt.NDArray[np.int32]]
STEP = 8  # rows are as long as the longest, rounded up to a multiple of this


def trained(texts: Iterable[str], config: BartConfig) -> Any:
    """A byte-level BPE of these texts, with as many tokens as the model has.

    Raises:
      ImportError: `tokenizers` is not installed.
      ValueError: The model has fewer tokens than there are bytes.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ImportError("tokenizers is not installed: pip install -e '.[text]'") from None
    of_model = (config.pad_token_id, config.eos_token_id, config.decoder_start_token_id)
    special = [f"<{i}>" for i in range(max(of_model) + 1)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if config.vocab_size < (least := len(special) + len(alphabet)):
        raise ValueError(
            f"vocab_size = {config.vocab_size} is too small for all bytes: set {least} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size, special_tokens=special, initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encoded(
    tokenizer: Any,
    pairs: Sequence[Pair],
    config: BartConfig,
    source: int,
    target: int,
    pad_to_max_length: bool = False,
) -> Rows:
    """Tokens of all pairs, cut to `source` and `target` of them; the last of a row is the end.

    Rows are filled up to the longest one, or with `pad_to_max_length` to those lengths.

    Returns:
      input_ids and attention_mask [N, S], labels [N, T].
    """
    end = config.eos_token_id

    def cut(texts: list[str], most: int) -> list[list[int]]:
        rows = [row.ids for row in tokenizer.encode_batch(texts)]
        return [[*(row[:-1] if row[-1:] == [end] else row)[: most - 1], end] for row in rows]

    sources = cut([text for text, _ in pairs], source)
    targets = cut([text for _, text in pairs], target)
    fill, least = config.pad_token_id, (source, target) if pad_to_max_length else (0, 0)
    ids = _filled(sources, fill, least[0], source)
    mask = np.arange(ids.shape[1]) < np.array([*map(len, sources)])[:, None]
    labels = _filled(targets, fill, least[1], target)
    return {"input_ids": ids, "attention_mask": mask.astype(np.int32), "labels": labels}


def texts_of(tokenizer: Any, targets: npt.NDArray[np.int32], config: BartConfig) -> list[str]:
    """Text up to the end of each target; the token that it starts from is not there."""
    rows = []
    for row in targets[:, 1:].tolist():
        end = row.index(config.eos_token_id) if config.eos_token_id in row else len(row)
        rows.append(row[:end])
    return [text.strip() for text in tokenizer.decode_batch(rows)]


def _filled(rows: list[list[int]], fill: int, least: int, most: int) -> npt.NDArray[np.int32]:
    length = max(least, min(most, -max(map(len, rows)) // STEP * -STEP))
    out = np.full((len(rows), length), fill, np.int32)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return out


def shuffled(rows: Rows, taken: int, updates: int, seed: int, mesh: Mesh) -> Iterator[Rows]:
    """This process's part of `updates` batches, each epoch in an order of its own."""
    count = len(rows["labels"])
    own = zerojax.process_rows(taken, mesh)
    for step in range(updates):
        epoch, at = divmod(step, count // taken)
        order = np.random.default_rng((seed, epoch)).permutation(count)
        chosen = order[at * taken : (at + 1) * taken][own]
        yield {name: values[chosen] for name, values in rows.items()}


def in_order(rows: Rows, taken: int, mesh: Mesh) -> Iterator[Rows]:
    """This process's part of batches of `taken` rows; the last has what is left."""
    for first in range(0, len(rows["labels"]), taken):
        batch = {name: values[first : first + taken] for name, values in rows.items()}
        own = zerojax.process_rows(len(batch["labels"]), mesh)
        yield {name: values[own] for name, values in batch.items()}
