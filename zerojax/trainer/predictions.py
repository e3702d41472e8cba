"""Predictions of an evaluation, copied to the host and concatenated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.models.losses import IGNORED
from zerojax.xla.types import PyTree


class EvalPrediction(NamedTuple):
    """Argument of ``compute_metrics``: all rows, in order, in every process.

    Attributes:
      predictions: The model's results other than the loss; a tuple if there are several.
      label_ids: The labels; a tuple if the batch has several of ``label_names``, None if it has
        none.
    """

    predictions: PyTree
    label_ids: PyTree


class PredictionOutput(NamedTuple):
    """Result of ``predict``: the fields of :class:`EvalPrediction`, and the metrics."""

    predictions: PyTree
    label_ids: PyTree
    metrics: dict[str, float]


def to_host(tree: PyTree) -> PyTree:
    """Returns global arrays, which may span several processes, as NumPy arrays."""

    def gathered(x: jax.Array | np.ndarray) -> np.ndarray:
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.asarray(x)

    return jax.tree.map(gathered, tree)


def joined(parts: Sequence[Mapping[str, PyTree]]) -> PyTree:
    """Concatenates batches; pads rows of different lengths with -100.

    Example:
      >>> joined([{"logits": np.ones((1, 2), int)}, {"logits": np.ones((1, 3), int)}]).tolist()
      [[1, 1, -100], [1, 1, 1]]
    """
    columns = [_concatenated([part[name] for part in parts]) for name in (parts or [{}])[0]]
    return columns[0] if len(columns) == 1 else tuple(columns) or None


def _concatenated(parts: Sequence[PyTree]) -> PyTree:
    if isinstance(parts[0], Mapping):
        return {k: _concatenated([part[k] for part in parts]) for k in parts[0]}
    if isinstance(parts[0], tuple | list):
        return tuple(_concatenated([*group]) for group in zip(*parts, strict=True))
    if parts[0].ndim < 2 or len({x.shape[1] for x in parts}) == 1:
        return np.concatenate(parts)
    longest = max(x.shape[1] for x in parts)
    padding = [((0, 0), (0, longest - x.shape[1]), *[(0, 0)] * (x.ndim - 2)) for x in parts]
    padded = (
        np.pad(x, widths, constant_values=IGNORED) for x, widths in zip(parts, padding, strict=True)
    )
    return np.concatenate([*padded])
