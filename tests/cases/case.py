"""What a case is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEPS = 20
ROWS = 32  # eight devices times four micro-batches of one row


@dataclass(frozen=True)
class Case:
    """A training program.

    Attributes:
      create: ``create(key, dtype)`` is a ``TrainState``, or the pair ``(model, optimizer)`` of
        NNX, whose floating-point arrays have that dtype.
      step: ``step(state, *arguments)`` gives ``(state, metrics)``, that of NNX
        ``step(model, optimizer, *arguments)`` gives ``metrics``. ``metrics["loss"]`` is a scalar.
      arguments: ``arguments(dtype)`` is what the step takes beside the state, ``STEPS`` times:
        host arrays of ``ROWS`` rows, and keys.
      nnx: whether it is one of NNX.
      averages: the loss is a mean over rows, and the step is deterministic but for them: the
        mean of the losses of equal micro-batches is the loss of the batch.
    """

    name: str
    create: Callable[[jax.Array, Any], Any]
    step: Callable[..., Any]
    arguments: Callable[[Any], list[tuple[Any, ...]]]
    nnx: bool = False
    averages: bool = False


def cast(tree: Any, dtype: Any) -> Any:
    """``tree`` with its floating-point leaves in ``dtype``."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def batches(dtype: Any, make: Callable[[np.random.Generator], Any]) -> list[tuple[Any, ...]]:
    """``STEPS`` different batches, the same in each call."""
    rng = np.random.default_rng(0)
    return [(cast(make(rng), dtype),) for _ in range(STEPS)]


def vectors(dtype: Any, n_in: int = 16, n_out: int = 8) -> list[tuple[Any, ...]]:
    """Inputs and targets of a regression."""
    return batches(
        dtype,
        lambda rng: {"x": rng.normal(size=(ROWS, n_in)), "y": rng.normal(size=(ROWS, n_out))},
    )


def labelled(dtype: Any, n_in: int = 16, classes: int = 8) -> list[tuple[Any, ...]]:
    """Inputs and class labels."""
    return batches(
        dtype,
        lambda rng: {
            "x": rng.normal(size=(ROWS, n_in)),
            "label": rng.integers(classes, size=ROWS, dtype=np.int32),
        },
    )


def tokens(dtype: Any, length: int = 9, vocabulary: int = 32) -> list[tuple[Any, ...]]:
    """Rows of tokens, each in even strides, so that there is something to learn."""

    def make(rng: np.random.Generator) -> np.ndarray:
        start = rng.integers(vocabulary, size=(ROWS, 1))
        stride = rng.integers(1, 4, size=(ROWS, 1))
        return ((start + stride * np.arange(length)) % vocabulary).astype(np.int32)

    return batches(dtype, make)


def with_key(arguments: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The same arguments, each with the one key of the run behind it."""
    return [(*given, jax.random.key(7)) for given in arguments]
