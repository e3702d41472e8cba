"""The arrays that are quantized, and the dimension along which elements share a scale."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import jax.numpy as jnp

from zerojax.plan import rule
from zerojax.plan.quantized import NOT_QUANTIZED
from zerojax.xla.types import Shaped

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_NNX_VALUE = re.compile(r"\.(raw_)?value$")


def is_matrix(path: str, x: Shaped) -> bool:
    """Returns whether an array is quantized by default: a matrix, or a stack of matrices, of more
    than 8192 elements that is not a table of embeddings.

    Example:
      >>> is_matrix("['Dense_0']['kernel']", jnp.zeros((128, 128)))
      True
      >>> is_matrix("['wte']['embedding']", jnp.zeros((128, 128)))
      False
    """
    is_large = len(x.shape) > 1 and math.prod(x.shape) > rule.SMALL
    return is_large and not NOT_QUANTIZED.search(_NNX_VALUE.sub("", path))


def is_floating(x: Shaped) -> bool:
    """Returns whether an array has a floating dtype of at least 16 bits."""
    return jnp.dtype(x.dtype) in _DTYPES


def input_dimension(shape: Sequence[int]) -> int:
    """Returns the dimension whose elements share scales: the largest but the last, which holds
    outputs, and in arrays of four or more dimensions not the first, which holds layers.

    Example:
      >>> input_dimension((768, 3072)), input_dimension((12, 768, 3072))
      (0, 1)
      >>> input_dimension((768, 12, 64)), input_dimension((12, 12, 64, 768))
      (0, 2)
    """
    inputs = range(1 if len(shape) > 3 else 0, len(shape) - 1)
    return max(inputs, key=lambda d: shape[d])
