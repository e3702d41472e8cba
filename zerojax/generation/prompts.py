"""Prompts as rows of tokens that start in the first column.

Shapes: B rows, T tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

Tokens = ArrayLike | Sequence[Sequence[int]]


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
          ValueError: There is no row, or a prompt is empty.
          TypeError: The tokens are not integers.

        >>> Prompts.of([[5, 6, 7], [8]], None).tokens.tolist()
        [[5, 6, 7], [8, 0, 0]]
        >>> Prompts.of([[0, 0, 8]], [[0, 0, 1]]).tokens.tolist()
        [[8]]
        """
        if isinstance(tokens, jax.Array | np.ndarray):
            array = np.asarray(tokens)
            if array.ndim != 2:
                raise ValueError(
                    f"tokens have the shape {array.shape}: pass int [rows, tokens], or a sequence "
                    "of tokens for each row"
                )
            kept = np.ones(array.shape, bool) if mask is None else np.asarray(mask) != 0
            if kept.shape != array.shape:
                raise ValueError(f"mask has the shape {kept.shape}, and tokens {array.shape}")
            rows = [row[keep] for row, keep in zip(array, kept, strict=True)]
        else:
            rows = [np.asarray(row) for row in tokens]  # type: ignore[union-attr]
            if mask is not None:
                return cls.of(np.asarray(tokens), mask)
        if not rows:
            raise ValueError("tokens have no row: pass int [rows, tokens] with one row or more")
        for i, row in enumerate(rows):
            if not row.size:
                raise ValueError(
                    f"the prompt of row {i} is empty: start it with the model's first token (BOS)"
                )
            if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
                raise TypeError(
                    f"the prompt of row {i} is {row.dtype} {row.shape}: pass integers [tokens]"
                )
        lengths = np.array([row.size for row in rows], np.int32)
        padded = np.zeros((len(rows), int(lengths.max())), np.int32)
        for line, row in zip(padded, rows, strict=True):
            line[: row.size] = row
        return cls(padded, lengths)

    @property
    def mask(self) -> np.ndarray:
        """bool [B, T], False after the end of a prompt."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def check(self, vocabulary: int) -> None:
        """Rejects tokens that the model does not have.

        Raises:
          ValueError: A token is out of range.
        """
        is_wrong = (self.tokens < 0) | (self.tokens >= vocabulary)
        is_wrong &= self.mask
        if is_wrong.any():
            row, at = (int(i) for i in np.argwhere(is_wrong)[0])
            raise ValueError(
                f"token {self.tokens[row, at]} at position {at} of row {row} is not among the "
                f"model's {vocabulary} tokens (0 ... {vocabulary - 1}): check the tokenizer"
            )
