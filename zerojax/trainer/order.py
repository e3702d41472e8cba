"""Order of a dataset's rows in an epoch: transformers' ``train_sampling_strategy``.

- random: a permutation, drawn from the seed and the epoch.
- sequential: the dataset's order in every epoch.
- group_by_length: rows of similar length meet in an update, so that a collator pads little. The
  permutation is split into mega-batches of 50 updates (of fewer, so that there are four), each
  sorted from long to short; then the longest row of all comes first, where a lack of memory shows
  soonest. As in transformers' ``LengthGroupedSampler``, for the rows of all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

STRATEGIES = ("random", "sequential", "group_by_length")


def order_of(
    strategy: str, *, rows: int, seed: int, batch: int, lengths: np.ndarray | None = None
) -> Callable[[int], np.ndarray]:
    """Returns a function from an epoch to its row indices, int [rows], of which it keeps the last.

    Args:
      strategy: One of :data:`STRATEGIES`.
      rows: The number of rows.
      seed: The seed of the permutations.
      batch: Rows of an update.
      lengths: The length of each row, for "group_by_length".

    Example:
      >>> order_of("sequential", rows=4, seed=0, batch=2)(3)
      array([0, 1, 2, 3])
    """

    @functools.lru_cache(maxsize=1)
    def order(epoch: int) -> np.ndarray:
        if strategy == "sequential":
            return np.arange(rows)
        permutation = np.random.default_rng((seed, epoch)).permutation(rows)
        return permutation if lengths is None else grouped(permutation, lengths, batch)

    return order


def grouped(permutation: np.ndarray, lengths: np.ndarray, batch: int) -> np.ndarray:
    """Sorts the mega-batches of a permutation by length, and puts the longest row first.

    Args:
      permutation: Row indices, int [rows].
      lengths: The length of each row, by index.
      batch: Rows of an update.

    Example:
      >>> grouped(np.array([3, 0, 1, 2]), np.array([5, 6, 9, 7]), batch=1).tolist()
      [2, 0, 1, 3]
    """
    size = batch * max(1, min(len(lengths) // (batch * 4), 50))
    groups = [permutation[i : i + size] for i in range(0, len(permutation), size)]
    # Stable, so that rows of equal length keep the permutation's order.
    groups = [group[np.argsort(-lengths[group], kind="stable")] for group in groups]
    longest = int(np.argmax([lengths[group[0]] for group in groups]))
    groups[0][0], groups[longest][0] = groups[longest][0], groups[0][0]
    return np.concatenate(groups)


def row_lengths(dataset: Any, column: str) -> np.ndarray:
    """Returns the length of each row, int [rows].

    It is the value of ``length_column_name`` if the rows have that field, else the number of
    ``input_ids``; without a column to read, every row is read once.

    Args:
      dataset: Rows by index; a ``datasets.Dataset`` is read by column.
      column: ``length_column_name``.

    Raises:
      ValueError: The rows have neither field.
    """
    has_columns = hasattr(dataset, "column_names")
    fields = dataset.column_names if has_columns else dataset[0]
    for name in (column, "input_ids"):
        if isinstance(fields, Mapping | list) and name in fields:
            values = (
                dataset[name] if has_columns else (dataset[i][name] for i in range(len(dataset)))
            )
            return np.array([len(x) if name == "input_ids" else int(x) for x in values])
    raise ValueError(
        'train_sampling_strategy = "group_by_length" needs the lengths of rows: add a field '
        f"{column} (length_column_name) or input_ids"
    )
