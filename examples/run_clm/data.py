"""Text as bytes: reading, checking, splitting, batching.

A document is its UTF-8 bytes, a token is one byte, and byte 0, which no text holds, ends a
document; or it is what a tokenizer makes of it, and byte 0 has no token. Batches are a pure
function of (seed, step), so a run that resumes at step n sees exactly the batches that an unbroken
one would have seen.

Example::

    text = split(python_sources(max_bytes=4_000_000), block_size=128)
    text = split(documents("wikitext/", "train"), 128, None, documents("wikitext/", "validation"))
    batches = Batches(text.train, batch_size=32, block_size=128, seed=0)
    batches.batch_at(17)["tokens"]                         # int32 [32, 129], same every time
"""

import dataclasses
import hashlib
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from examples import tables

Tokens = npt.NDArray[np.uint8] | npt.NDArray[np.int32]

HELD_OUT_EVERY = 10  # one document in ten, or the last tenth of each where there are few
# Tests hold deliberately broken files; the others are tables or prose rather than programs.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}


class TextError(ValueError):
    """The text cannot be trained on; the message names the file and what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Two streams of bytes, uint8 [n], or of tokens, int32 [n]: one to train on, one that training
    never sees."""

    train: Tokens
    held_out: Tokens
    unit: str = "bytes"

    @property
    def fingerprint(self) -> str:
        """Length and hash of what is trained on."""
        digest = hashlib.sha256(self.train.tobytes()).hexdigest()[:12]
        return f"{len(self.train)} {self.unit}, sha256 {digest}"


def python_sources(max_bytes: int = 4_000_000) -> list[bytes]:
    """The standard library's own .py files in the order of their names, up to `max_bytes`."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    documents, total = [], 0
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts[:-1])
        if folders & SKIPPED_FOLDERS or any(name.endswith("-packages") for name in folders):
            continue
        try:
            document = read_text(path)
        except TextError:  # empty __init__.py files and the odd legacy encoding
            continue
        if total + len(document) > max_bytes:
            break
        documents.append(document)
        total += len(document)
    if not documents:
        raise TextError(f"no Python sources under {root}: name text files of your own with --text")
    return documents


def read_text(path: str | pathlib.Path) -> bytes:
    """A file's bytes, once they have proved to be UTF-8 text."""
    path = pathlib.Path(path)
    if path.is_dir():
        raise TextError(f"{path} is a directory: name the text files inside it")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TextError(f"{path}: no such file") from None
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise TextError(f"{path} is empty")
    if (offset := data.find(0)) >= 0:
        raise TextError(f"{path} is not text: NUL byte at offset {offset}")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start} "
            f"({error.reason})"
        ) from None
    return data


def documents(source: str, split: str) -> list[bytes]:
    """The texts of a dataset's split: each .txt file of a folder, and each row's column "text".

    Args:
      source: A folder (`tables.files`), or a name for `datasets.load_dataset`.
      split: "train" or "validation"; a folder may lack the second, which is [].

    Raises:
      TextError: A text cannot be trained on, or there is none to train on.
      ValueError: A file has no column "text".
      ImportError: A library that reads the dataset is not installed.
    """
    folder = pathlib.Path(source)
    if not folder.is_dir():
        return _column(source, split)
    files = tables.files(folder, split, ".txt")
    if split == "train" and not files:
        suffixes = ", ".join((".txt", *tables.SUFFIXES))
        raise TextError(f"{source} has no file to train on: {suffixes}")
    return [
        text
        for file in files
        for text in ([read_text(file)] if file.suffix == ".txt" else _column(str(file), split))
    ]


def _column(source: str, split: str) -> list[bytes]:
    """The texts of the column "text" that are not empty."""
    rows = tables.read(source, ["text"], split=split)
    texts = [str(row["text"]).encode() for row in rows if row["text"]]
    if any(b"\0" in text for text in texts):
        raise TextError(f"{source} has a row with a NUL character, which is no text")
    return texts


def split(
    documents: Sequence[bytes],
    block_size: int,
    tokenizer: Any = None,
    held_out: Sequence[bytes] = (),
) -> Text:
    """Documents to a training and a held-out stream, each long enough for one block; of a
    `tokenizers.Tokenizer`'s tokens where one is given.

    Without documents that are held out: with `HELD_OUT_EVERY` documents or more, every tenth
    document is; with fewer, the last tenth of each.
    """
    if held_out:
        train = list(documents)
    elif len(documents) >= HELD_OUT_EVERY:
        held_out = list(documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        train = [d for i, d in enumerate(documents) if (i + 1) % HELD_OUT_EVERY]
    else:
        cuts = [len(d) - len(d) // HELD_OUT_EVERY for d in documents]
        train = [d[:cut] for d, cut in zip(documents, cuts, strict=True)]
        held_out = [d[cut:] for d, cut in zip(documents, cuts, strict=True)]
    if tokenizer is None:
        text = Text(_join(train), _join(held_out))
    else:
        text = Text(_encoded(train, tokenizer), _encoded(held_out, tokenizer), "tokens")
    shortest = min(len(text.train), len(text.held_out))
    if shortest < block_size + 1:
        raise TextError(
            f"the text is shorter than one block: {len(text.train)} {text.unit} to train on and "
            f"{len(text.held_out)} held out, but a block of {block_size} needs {block_size + 1} in "
            f"each. Give more text, or --block_size {max(1, shortest - 1)} or less"
        )
    return text


@dataclasses.dataclass(frozen=True)
class Batches:
    """Windows of one stream; no state but the step.

    A batch has `own` (None: all) of the `batch_size` rows of all processes. Windows are random, or
    with `in_epochs` the stream's blocks, each once an epoch in an order of its own.
    """

    stream: Tokens
    batch_size: int
    block_size: int
    seed: int = 0
    own: slice | None = None
    in_epochs: bool = False

    @property
    def per_epoch(self) -> int:
        """Batches of an epoch; the last incomplete one is left out."""
        return self._blocks // self.batch_size

    def batch_at(self, step: int) -> dict[str, npt.NDArray[np.int32]]:
        """{"tokens": int32 [own rows, block_size + 1]}, a function of (seed, step) alone."""
        if self.in_epochs:
            epoch, at = divmod(step, self.per_epoch)
            order = np.random.default_rng((self.seed, epoch)).permutation(self._blocks)
            starts = order[at * self.batch_size :][: self.batch_size] * self.block_size
        else:
            rng = np.random.default_rng((self.seed, step))
            starts = rng.integers(0, len(self.stream) - self.block_size, size=self.batch_size)
        return _windows(self.stream, starts[self.own or slice(None)], self.block_size)

    @property
    def _blocks(self) -> int:
        return (len(self.stream) - 1) // self.block_size

    def spread(self, count: int) -> Iterator[dict[str, npt.NDArray[np.int32]]]:
        """`count` batches of windows evenly spread over the stream: the same at every call."""
        last = len(self.stream) - self.block_size - 1
        starts = np.linspace(0, last, count * self.batch_size).astype(np.int64)
        for some in np.split(starts, count):
            yield _windows(self.stream, some[self.own or slice(None)], self.block_size)


def _windows(
    stream: Tokens, starts: npt.NDArray[np.int64], block_size: int
) -> dict[str, npt.NDArray[np.int32]]:
    return {"tokens": stream[starts[:, None] + np.arange(block_size + 1)].astype(np.int32)}


def _encoded(documents: Sequence[bytes], tokenizer: Any) -> npt.NDArray[np.int32]:
    """The documents' tokens one after the other; a character that is cut in two is replaced."""
    rows = tokenizer.encode_batch([d.decode("utf-8", "replace") for d in documents])
    return np.concatenate([np.asarray(row.ids, np.int32) for row in rows])


def _join(documents: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(d + b"\0" for d in documents), np.uint8)
