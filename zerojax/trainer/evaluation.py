"""Evaluation of an entire dataset: the loss over all its rows, predictions, metrics."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from zerojax.api import Zero
from zerojax.models.losses import IGNORED
from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import check_metric
from zerojax.trainer.data import Reader
from zerojax.trainer.losses import Forward
from zerojax.trainer.model import Model, objects
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


ComputeMetrics = Callable[[EvalPrediction], Mapping[str, Any]]
Preprocess = Callable[[PyTree, PyTree], PyTree]


class Evaluator:
    """Evaluates a model on datasets of any size.

    ``zero.evaluate`` pads a batch's rows to a multiple of the devices with copies that do not
    count, so that the results equal those of plain evaluation: for a scalar loss the mean over the
    dataset's rows, for a pair of values and weights the weighted mean over all its tokens.

    Args:
      model: The model to evaluate.
      zero: The ``Zero`` of the run.
      rows: Rows of a batch, over all devices.
      labels: The names of the label fields.
      compute_metrics, preprocess: As for the Trainer.
    """

    compute_metrics: ComputeMetrics | None

    def __init__(
        self,
        model: Model,
        zero: Zero,
        rows: int,
        labels: tuple[str, ...],
        compute_metrics: ComputeMetrics | None,
        preprocess: Preprocess | None,
    ) -> None:
        self._rows, self._labels = rows, labels
        self.compute_metrics, self._preprocess = compute_metrics, preprocess
        self._loss_only = zero.evaluate(model.evaluation(_loss))
        self._with_predictions = zero.evaluate(model.evaluation(self._kept))

    def run(
        self,
        state: PyTree,
        reader: Reader,
        prefix: str,
        keep: bool,
        limit: int | None = None,
        done: Callable[[int], object] = lambda rows: None,
    ) -> PredictionOutput:
        """Evaluates a dataset.

        Args:
          state: The training state.
          reader: The dataset's reader.
          prefix: The prefix of the metrics' names.
          keep: Whether to keep predictions.
          limit: The number of rows to evaluate, the first ones; all by default.
          done: Called after each batch with the number of its rows.

        Raises:
          TypeError: ``compute_metrics`` does not return a dict.
          Exception: Any error of ``compute_metrics``, with a note of the shapes that it received.
        """
        start, sums, kept, n = time.perf_counter(), [], [], 0
        function = self._with_predictions if keep else self._loss_only
        for rows, batch in reader.all(self._rows, limit):
            out = function(objects(state)[0], batch)
            value, weight = out["loss"] or (0.0, 0.0)
            # The loss is a mean over these rows, or a sum with its weight.
            sums.append((value * rows, rows) if weight is None else (value, weight))
            kept.append(to_host((out["predictions"], out["labels"])) if keep else ({}, {}))
            jax.block_until_ready(sums[-2:-1])  # at most one batch is in flight
            n += rows
            done(rows)
        metrics: dict[str, float] = {}
        if total := sum(float(weight) for _, weight in sums):
            metrics[f"{prefix}_loss"] = sum(float(value) for value, _ in sums) / total
        evaluated = EvalPrediction(
            *([joined(parts) for parts in zip(*kept, strict=True)] or (None, None))
        )
        if keep and self.compute_metrics is not None and evaluated.label_ids is not None:
            metrics |= self._computed(evaluated, prefix)
        seconds = time.perf_counter() - start
        speed = {
            "runtime": seconds,
            "samples_per_second": n / seconds,
            "steps_per_second": len(sums) / seconds,
        }
        metrics |= {f"{prefix}_{name}": value for name, value in speed.items()}
        return PredictionOutput(*evaluated, metrics)

    def _computed(self, given: EvalPrediction, prefix: str) -> dict[str, float]:
        assert self.compute_metrics is not None
        try:
            computed = self.compute_metrics(given)
            if not isinstance(computed, Mapping):
                kind = type(computed).__name__
                raise TypeError(f"compute_metrics returned {kind}; return a dict of numbers")
            plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in computed.items()}
            json.dumps(plain)  # checkpoints hold the history
        except Exception as error:
            shapes = jax.tree.map(np.shape, tuple(given))
            error.add_note(
                f"Raised by compute_metrics for predictions {shapes[0]} and label_ids {shapes[1]}."
            )
            raise
        return {(k if k.startswith(f"{prefix}_") else f"{prefix}_{k}"): v for k, v in plain.items()}

    def try_metrics(
        self, state: PyTree, readers: Mapping[str, Reader], keep: bool, args: TrainingArguments
    ) -> None:
        """Evaluates one batch, so that errors in the metrics appear before the first step.

        A metric may be undefined on one batch; if that evaluation fails, this method evaluates the
        entire datasets.

        Args:
          state, keep: As for :meth:`run`.
          readers: The readers of the evaluation sets by prefix.
          args: The arguments of the run; if the best checkpoint counts, they name a metric that
            evaluations must return.

        Raises:
          ValueError: That metric is missing, or there are no labels for ``compute_metrics``.
        """

        def evaluate(limit: int | None) -> None:
            metrics: dict[str, float] = {}
            for prefix, reader in readers.items():
                output = self.run(state, reader, prefix, keep, limit)
                if keep and output.label_ids is None:
                    raise ValueError(
                        "compute_metrics needs labels, and no field of eval_dataset is named "
                        f"{' or '.join(self._labels)}: name them in label_names"
                    )
                metrics |= output.metrics
            if args.load_best_model_at_end or args.save_strategy == "best":
                check_metric(args.metric_for_best_model, metrics)

        try:
            evaluate(self._rows)
        except Exception:
            evaluate(None)

    def _kept(self, forward: Forward, batch: Mapping[str, PyTree]) -> dict[str, PyTree]:
        predictions: PyTree = forward.predictions
        labels = {name: batch[name] for name in self._labels if name in batch}
        if self._preprocess is not None:
            prediction, label = (
                (next(iter(x.values())) if len(x) == 1 else tuple(x.values()) or None)
                for x in (predictions, labels)
            )
            predictions = {"predictions": self._preprocess(prediction, label)}
        return _loss(forward, batch) | {"predictions": predictions, "labels": labels}


def evaluation_sets(given: object, prefix: str) -> dict[str, Any]:
    """Returns evaluation sets by the prefix of their metrics, or of messages.

    Args:
      given: A dataset, or a dict of datasets by name.
      prefix: The prefix of the dataset, or of the names.

    Raises:
      ValueError: The dict is empty.

    Example:
      >>> evaluation_sets({"long": [1, 2], "short": [3]}, "eval")
      {'eval_long': [1, 2], 'eval_short': [3]}
    """
    if isinstance(given, Mapping):
        if not given:
            raise ValueError("eval_dataset is a dict without datasets: add one, or pass None")
        return {f"{prefix}_{name}": dataset for name, dataset in given.items()}
    return {prefix: given}


def _loss(forward: Forward, batch: PyTree) -> dict[str, PyTree]:
    """Returns the batch's loss: (sum, weight) for a pair, (mean, None) for a scalar, or None."""
    mean = None if forward.mean is None else (forward.mean, None)
    return {"loss": mean if forward.sums is None else forward.sums}


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
    if not parts:
        return None
    columns = [*jax.tree.map(lambda *each: _concatenated(each), *parts).values()]
    return columns[0] if len(columns) == 1 else tuple(columns) or None


def _concatenated(parts: Sequence[np.ndarray]) -> np.ndarray:
    if parts[0].ndim < 2 or len({x.shape[1] for x in parts}) == 1:
        return np.concatenate(parts)
    longest = max(x.shape[1] for x in parts)
    padding = [((0, 0), (0, longest - x.shape[1]), *[(0, 0)] * (x.ndim - 2)) for x in parts]
    padded = map(functools.partial(np.pad, constant_values=IGNORED), parts, padding)
    return np.concatenate([*padded])
