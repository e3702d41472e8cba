"""A metric and the bytes of weights, before and after their quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.plan.table import columns, size
from zerojax.quantize.weights import is_quantized
from zerojax.train_state.linen import is_train_state
from zerojax.xla.types import PyTree


@dataclass(frozen=True)
class QuantizationReport:
    """The costs and savings of quantized weights; ``str()`` of it is a table.

    Attributes:
      before, after: The mean of the metric over the batches, with original and quantized weights.
      bytes_before, bytes_after: The bytes of the weights, over all devices once.
      quantized: The number of arrays that are quantized.
      kept: The number of other arrays.
    """

    before: float
    after: float
    bytes_before: int
    bytes_after: int
    quantized: int
    kept: int

    @property
    def relative_loss(self) -> float:
        """The change of the metric for the worse, relative to its value before; negative for the
        better."""
        change = self.after - self.before
        return change / abs(self.before) if self.before else math.inf * change if change else 0.0

    def __str__(self) -> str:
        rows = [
            ("", "original", "quantized", "change"),
            (
                "metric",
                f"{self.before:.6g}",
                f"{self.after:.6g}",
                f"{self.relative_loss:+.2%} worse",
            ),
            (
                "weights",
                size(self.bytes_before),
                size(self.bytes_after),
                f"{self.bytes_after / self.bytes_before:.2f} times",
            ),
            ("arrays", "0 quantized", f"{self.quantized} quantized", f"{self.kept} kept"),
        ]
        return "\n".join(columns(rows))


def quantization_report(
    metric: Callable[[PyTree, PyTree], jax.typing.ArrayLike],
    original: PyTree,
    quantized: PyTree,
    batches: Iterable[PyTree],
    *,
    max_loss: float | None = None,
) -> QuantizationReport:
    r"""Compares a metric of original and of quantized weights on the same batches.

    .. math:: \text{relative loss} = (m_\text{quantized} - m_\text{original}) / |m_\text{original}|

    Args:
      metric: ``metric(state, batch)`` returns a scalar that is better if lower, such as a loss, a
        perplexity or the negative of an accuracy: a function of ``zero.evaluate``, or one under
        ``jax.jit`` that calls :func:`zerojax.dequantize`.
      original: The state, parameters or module that ``metric`` takes.
      quantized: The result of :func:`zerojax.quantize_weights` for ``original``.
      batches: At least one batch; the metric is the mean over the batches.
      max_loss: The highest relative loss that is accepted, such as 0.02; None accepts any.

    Raises:
      ValueError: The relative loss exceeds ``max_loss`` or is NaN; there is no batch; the metric is
        not a scalar; or no array of ``quantized`` is quantized.

    Example:
      >>> from zerojax import dequantize, quantize_weights
      >>> params = {"kernel": jax.random.normal(jax.random.key(0), (128, 128))}
      >>> loss = jax.jit(lambda params, x: jnp.mean((x @ dequantize(params)["kernel"]) ** 2))
      >>> report = quantization_report(
      ...     loss, params, quantize_weights(params), [jnp.ones((4, 128))], max_loss=0.02
      ... )
      >>> report.bytes_before, report.bytes_after
      (65536, 16896)
    """
    nodes = jax.tree.leaves(_weights(quantized), is_leaf=is_quantized)
    n_quantized = sum(map(is_quantized, nodes))
    if not n_quantized:
        raise ValueError(
            "quantization_report: no array of the quantized weights is quantized: pass "
            "zerojax.quantize_weights(original) as the third argument"
        )
    pairs = [(_scalar(metric(original, b)), _scalar(metric(quantized, b))) for b in batches]
    if not pairs:
        raise ValueError("quantization_report: batches is empty: pass at least one batch")
    before, after = map(float, np.mean(pairs, axis=0))
    report = QuantizationReport(
        before,
        after,
        _bytes(original),
        _bytes(quantized),
        n_quantized,
        len(nodes) - n_quantized,
    )
    if max_loss is not None and not report.relative_loss <= max_loss:
        raise ValueError(
            f"quantization loses {report.relative_loss:.2%} of the metric, more than "
            f"max_loss={max_loss:.2%}: write bits=8, a smaller group_size, or select=... without "
            f"the matrices that lose most\n{report}"
        )
    return report


def _weights(tree: PyTree) -> PyTree:
    return tree.params if is_train_state(tree) else tree


def _scalar(value: Any) -> float:
    if np.ndim(value):
        raise ValueError(
            f"quantization_report: the metric has shape {np.shape(value)}: return a scalar, such "
            "as the mean loss of the batch"
        )
    return float(value)


def _bytes(tree: PyTree) -> int:
    return sum(array_bytes(x.shape, x.dtype) for x in jax.tree.leaves(_weights(tree)))


def array_bytes(shape: Sequence[int], dtype: np.dtype) -> int:
    """Returns the bytes of an array; an int4 takes half a byte."""
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    bits = jnp.iinfo(dtype).bits if is_integer else 8 * dtype.itemsize
    return math.prod(shape) * bits // 8
