"""Pairs of sentences: from rows or from plain text, then as tokens, then in batches.

Example::

    train, held_out = from_text("The Python library's docstrings ...", seed=0)
    encoded = encode(train, tokenizer, max_length=128)
    encoded["input_ids"].shape                           # (4000, 96): the longest row, in eights
"""

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples import tables
from examples.run_clm.data import TextError, python_sources

HELD_OUT = 10  # a tenth of a source without a second one
WORDS = range(6, 25)  # in a sentence
SENTENCE = re.compile(r"[A-Z][^=>_{}\[\]\\`|]*[.?!]")  # no code, no heading

Arrays = dict[str, np.ndarray]


class Pair(NamedTuple):
    """Two sentences and their label as the source has it."""

    first: str
    second: str
    label: Any


def read(source: str, columns: Sequence[str], split: str) -> list[Pair]:
    """The rows of a file or of a dataset; `columns` are those of `Pair`, in its order."""
    pairs = [Pair(*row.values()) for row in tables.read(source, columns, split=split)]
    for number, pair in enumerate(pairs, 1):
        for column, sentence in zip(columns, pair[:2], strict=False):
            if not isinstance(sentence, str):
                raise ValueError(f"{source}: row {number} has {sentence!r} in {column!r}, no text")
    return pairs


def from_text(text: str, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Neighbouring sentences, to train on and held out: the last tenth of the text.

    Label 1 is the second sentence as written. In half of the pairs, of label 0, its words are
    shuffled: what begins and ends a sentence tells most of them apart.
    """
    sentences = [
        " ".join(s.split()) for s in re.split(r"(?<=[.?!])\s+", text.replace("<unk>", "unk"))
    ]
    kept = [s for s in sentences if len(s.split()) in WORDS and SENTENCE.fullmatch(s)]
    rng = np.random.default_rng(seed)
    pairs = []
    for first, second in itertools.pairwise(kept):
        label = int(rng.integers(2))
        pairs.append(Pair(first, second if label else _shuffled(second, rng), label))
    if len(pairs) < HELD_OUT:
        raise TextError(
            f"the text has {len(kept)} sentences of {WORDS[0]} to {WORDS[-1]} words, too few to "
            "learn from"
        )
    cut = len(pairs) // HELD_OUT
    return pairs[:-cut], pairs[-cut:]


def docstrings() -> str:
    """The prose of the Python library's own sources."""
    found = []
    for source in python_sources():
        nodes = ast.walk(ast.parse(source))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return "\n\n".join(found)


def classes(pairs: Sequence[Pair]) -> dict[str, int]:
    """A number for each label: its own, or its place among the sorted ones.

    >>> classes([Pair("", "", "yes"), Pair("", "", "no")])
    {'no': 0, 'yes': 1}
    """
    labels = {str(pair.label) for pair in pairs}
    if "-1" in labels:
        raise ValueError("a label is -1, as in splits whose labels are withheld: give others")
    if len(labels) < 2:
        raise ValueError(f"all rows have the label {labels.pop()!r}: there is nothing to learn")
    numbers = [str(i) for i in range(len(labels))]
    if all(label.isdecimal() for label in labels) and labels != set(numbers):
        shown = ", ".join(sorted(labels, key=int)[:10])
        raise ValueError(f"the labels are {shown}: number them from 0 to {len(labels) - 1}")
    return {
        label: i for i, label in enumerate(numbers if labels == set(numbers) else sorted(labels))
    }


def _shuffled(sentence: str, rng: np.random.Generator) -> str:
    return " ".join(rng.permutation(sentence.split()))


def encode(
    pairs: Sequence[Pair],
    tokenizer: Any,
    max_length: int,
    classes: Mapping[str, int],
    pad_to_max_length: bool = False,
) -> tuple[Arrays, int]:
    """Tokens, mask and types int32 [n, T], labels int32 [n], and how many pairs were cut.

    T is the longest row's, a multiple of 8, or with `pad_to_max_length` that length; of a pair with
    more than `max_length` tokens the longer sentence is cut.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts = [(pair.first, pair.second) for pair in pairs]
    longest = [len(row.ids) for row in tokenizer.encode_batch(texts)]
    tokenizer.enable_truncation(max_length)
    length = max_length if pad_to_max_length else min(max_length, -(-max(longest) // 8) * 8)
    tokenizer.enable_padding(length=length)
    rows = tokenizer.encode_batch(texts)
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    arrays = {
        name: np.array([getattr(row, field) for row in rows], np.int32)
        for name, field in columns.items()
    }
    arrays["labels"] = np.array([classes[str(pair.label)] for pair in pairs], np.int32)
    return arrays, sum(length > max_length for length in longest)


def epoch(arrays: Arrays, rows: int, seed: int, number: int) -> Iterator[Arrays]:
    """Batches of all rows in an order that follows from (seed, number); the last incomplete one is
    left out."""
    order = np.random.default_rng((seed, number)).permutation(len(arrays["labels"]))
    for start in range(0, len(order) - rows + 1, rows):
        chosen = order[start : start + rows]
        yield {name: x[chosen] for name, x in arrays.items()}


def in_order(arrays: Arrays, rows: int) -> Iterator[tuple[int, Arrays]]:
    """Batches of the same size in the rows' order, and how many of each count: the last one is
    filled up with rows from the beginning, which do not."""
    n = len(arrays["labels"])
    for start in range(0, n, rows):
        chosen = np.arange(start, start + rows) % n
        yield min(rows, n - start), {name: x[chosen] for name, x in arrays.items()}
