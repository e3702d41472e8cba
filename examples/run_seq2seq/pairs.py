"""Pairs of a source and a target: of files, or text whose case and punctuation are to be restored.

>>> restoring(["He came , saw and won ( in May ) . <unk> wrote it all down ."], words=5)
[('he came saw and won', 'He came, saw and won'), ('all down', 'all down.')]
"""

import ast
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from examples.run_clm.data import python_sources, read_text
from examples.tables import read

WIKITEXT = pathlib.Path(__file__).parents[3] / "shared" / "data" / "wikitext2_valid.txt"
HELD_OUT = 256

Pair = tuple[str, str]


class Pairs(NamedTuple):
    """Those to train on, and those that training never sees."""

    train: list[Pair]
    held_out: list[Pair]


def of_files(train: str, held_out: str, columns: Sequence[str], prefix: str = "") -> Pairs:
    """Two columns of files, or of a dataset's splits; each source begins with `prefix`.

    Raises:
      ValueError: A file lacks the columns, or has no rows.
      FileNotFoundError: A file does not exist.
    """

    def pairs(source: str, split: str) -> list[Pair]:
        rows = read(source, columns, split=split)
        return [(f"{prefix}{row[columns[0]]}", str(row[columns[1]])) for row in rows]

    return Pairs(pairs(train, "train"), pairs(held_out, "validation"))


def of_text(path: pathlib.Path | None, words: int, prefix: str = "") -> Pairs:
    """Those of a text: a file's, WikiText's where it lies beside the repository, else the
    docstrings of Python's library.

    Raises:
      ValueError: The file cannot be read, or is too short.
    """
    if path is None and WIKITEXT.is_file():
        path = WIKITEXT
    lines = docstrings() if path is None else read_text(path).decode().splitlines()
    pairs = [(prefix + source, target) for source, target in restoring(lines, words)]
    every = max(2, len(pairs) // HELD_OUT)
    pairs = pairs[: HELD_OUT * every]
    return Pairs([p for i, p in enumerate(pairs, 1) if i % every], pairs[every - 1 :: every])


def restoring(lines: Iterable[str], words: int) -> list[Pair]:
    """Stretches of up to `words` words, in lower case without punctuation, and as they were.

    A line that is a heading (`= Lobster =`), and words beside an unknown one, are left out.
    """
    targets = (target for line in lines for target in _stretches(line, words))
    pairs = ((re.sub(r"[^\w\s'-]", "", target.lower()), target) for target in targets)
    return [(" ".join(source.split()), target) for source, target in pairs if source.strip()]


def _stretches(line: str, words: int) -> Iterator[str]:
    if line.strip().startswith("="):
        return
    line = re.sub(r" @(.)@ ", r"\1", line)  # WikiText's marks within a number or a word
    line = re.sub(r" ([.,;:!?)%]|'s\b)", r"\1", line).replace("( ", "(")
    split = line.split()
    for first in range(0, len(split), words):
        stretch = " ".join(split[first : first + words])
        if "<unk>" not in stretch and stretch.isascii() and words < len(stretch) < 7 * words:
            yield stretch


def docstrings() -> Iterator[str]:
    """The paragraphs of docstrings of Python's library that are sentences."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    for source in python_sources():
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
        for text in filter(None, map(ast.get_docstring, nodes)):
            paragraphs = (" ".join(part.split()) for part in text.split("\n\n"))
            yield from (part for part in paragraphs if re.fullmatch(r"[A-Z][^>=_{}|\\]*\.", part))
