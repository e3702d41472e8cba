"""Prompts as rows of tokens that start in the first column.

Shapes: B rows, T tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike

from zerojax.generation.decoders import Source

Tokens = ArrayLike | Sequence[Sequence[int]]

_INT32 = np.iinfo(np.int32)
SHAPES = "pass int [rows, tokens], or a sequence of tokens for each row"


class Prompts(NamedTuple):
    """Prompts of one batch.

    Attributes:
      tokens: int32 [B, T], with any token after the end of a shorter prompt.
      lengths: int32 [B], the number of tokens of each prompt.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, tokens: Tokens, mask: ArrayLike | None) -> Prompts:
        """Checks prompts.

        Args:
          tokens: int [B, T], or a sequence of tokens for each row.
          mask: [B, T], 0 or False on padding, on either side of a row.

        Raises:
          ValueError: There is no row, a prompt is empty, the mask does not fit, or a token is no
            int32.
          TypeError: The tokens are not integers.

        >>> Prompts.of([[5, 6, 7], [8]], None).tokens.tolist()
        [[5, 6, 7], [8, 0, 0]]
        >>> Prompts.of([[0, 0, 8]], [[0, 0, 1]]).tokens.tolist()
        [[8, 0, 0]]
        """
        rows = _rows("tokens", tokens)
        if not rows:
            raise ValueError(f"tokens have no row: {SHAPES}, with one row or more")
        for i, row in enumerate(rows):
            if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)):
                raise TypeError(
                    f"row {i} of tokens has shape {row.shape} and dtype {row.dtype}: {SHAPES}"
                )
        longest = max(row.size for row in rows)
        if mask is not None:
            rows = _kept(rows, mask)
        for i, row in enumerate(rows):
            if not row.size:
                raise ValueError(f"the prompt of row {i} is empty: start it with BOS")
            if (wraps := (row > _INT32.max) | (row < _INT32.min)).any():
                raise _unknown_token(row, int(np.argmax(wraps)), i, _INT32.max)
        padded = np.zeros((len(rows), longest), np.int32)
        for line, row in zip(padded, rows, strict=True):
            line[: row.size] = row
        return cls(padded, np.array([row.size for row in rows], np.int32))

    @property
    def mask(self) -> np.ndarray:
        """bool [B, T], False after the end of a prompt."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def source(self, room: int) -> Source:
        """Returns the prompts as the sources of an encoder-decoder, padded to `room` tokens."""
        padding = ((0, 0), (0, room - self.tokens.shape[1]))
        return Source(np.pad(self.tokens, padding), np.pad(self.mask, padding))

    def check(self, vocabulary: int) -> None:
        """Rejects tokens that the model does not have.

        Raises:
          ValueError: A token is out of range.
        """
        is_wrong = (self.tokens < 0) | (self.tokens >= vocabulary)
        is_wrong &= self.mask
        if is_wrong.any():
            row, at = (int(i) for i in np.argwhere(is_wrong)[0])
            raise _unknown_token(self.tokens[row], at, row, vocabulary - 1)


def _unknown_token(tokens: np.ndarray, at: int, row: int, last: int) -> ValueError:
    return ValueError(
        f"token {tokens[at]} at position {at} of row {row} is not among the model's tokens (0 "
        f"to {last}): check the tokenizer"
    )


def _rows(name: str, given: Any) -> list[np.ndarray]:
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise TypeError(f"{name}: a {type(given).__name__}: {SHAPES}")
    return [np.asarray(row) for row in (np.asarray(given) if hasattr(given, "shape") else given)]


def _kept(rows: list[np.ndarray], mask: Any) -> list[np.ndarray]:
    """Returns rows without the tokens at which a mask is 0.

    Raises:
      ValueError: The mask has another shape than the rows, or other numbers than 0 and 1.
    """
    masks = _rows("mask", mask)
    if len(masks) != len(rows):
        raise ValueError(f"mask has {len(masks)} rows, and tokens {len(rows)}")
    for i, (kept, row) in enumerate(zip(masks, rows, strict=True)):
        if kept.shape != row.shape or not np.isin(kept, (0, 1)).all():
            raise ValueError(
                f"row {i} of mask does not fit the {row.size} tokens: pass 1 or 0 for each"
            )
    return [row[kept != 0] for row, kept in zip(rows, masks, strict=True)]
