"""The arrays that are quantized, and the dimension along which elements share a scale."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from zerojax.plan import rule
from zerojax.plan.quantized import NOT_QUANTIZED
from zerojax.plan.stacks import stacks
from zerojax.xla.types import Shaped

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
_LAYERS = re.compile(r"layers?\b|blocks?\b|\bh\b|scan|stack", re.IGNORECASE)
_NNX_VALUE = re.compile(r"\.(raw_)?value$")


def in_stacks(paths: Sequence[KeyPath], shapes: Sequence[tuple[int, ...]]) -> list[bool]:
    """Returns for each array whether its first dimension holds layers.

    That is so in a subtree whose arrays have the same first dimension, some of them matrices and
    some vectors of each layer, and in one with a name of layers: ``layers``, ``blocks``, ``h``.
    """
    stacked = [False] * len(paths)
    for members in stacks(paths, shapes):
        has_vectors = any(len(shapes[i]) == 2 for i in members)
        for i in members:
            named = _LAYERS.search(jax.tree_util.keystr(paths[i][:-1]))
            stacked[i] |= has_vectors or named is not None
    return stacked


def is_matrix(path: str, x: Shaped, stacked: bool = False) -> bool:
    """Returns whether an array is quantized by default: a matrix, or a stack of matrices, of more
    than 8192 elements that is not a table of embeddings.

    Args:
      path: The path of the array, from ``jax.tree_util.keystr``.
      x: The array.
      stacked: Whether its first dimension holds layers.

    Example:
      >>> is_matrix("['Dense_0']['kernel']", jnp.zeros((128, 128)))
      True
      >>> is_matrix("['norm']['gain']", jnp.zeros((48, 1024)), stacked=True)
      False
    """
    is_large = len(x.shape) - stacked > 1 and math.prod(x.shape) > rule.SMALL
    return is_large and not NOT_QUANTIZED.search(_NNX_VALUE.sub("", path))


def is_floating(x: Shaped) -> bool:
    """Returns whether an array has a floating dtype of at least 16 bits."""
    return jnp.dtype(x.dtype) in _DTYPES


def input_dimension(shape: Sequence[int], stacked: bool = False) -> int:
    """Returns the dimension whose elements share scales: the largest but the last, which holds
    outputs, and the first of a stack and of arrays of four or more dimensions, which holds layers
    or a window.

    Example:
      >>> input_dimension((768, 3072)), input_dimension((80, 64, 64), stacked=True)
      (0, 1)
      >>> input_dimension((768, 12, 64)), input_dimension((12, 12, 64, 768))
      (0, 2)
    """
    inputs = range(1 if stacked or len(shape) > 3 else 0, len(shape) - 1)
    return max(inputs, key=lambda d: shape[d])
