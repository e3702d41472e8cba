"""What a program is, and what may come of it."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

ROWS = 32  # eight devices times four micro-batches of one row
WIDTH = 8
ADAM = optax.adam(1e-2)
SGD = optax.sgd(0.1, momentum=0.9)


class Kind(enum.Enum):
    """What may come of a program: the numbers of plain jit, an error, or a line in the log."""

    EQUAL = enum.auto()
    REFUSED = enum.auto()
    TOLD = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """What comes of a program.

    Attributes:
      words: part of the error's message, or of the line that the logger "zerojax" writes.
    """

    kind: Kind
    words: str = ""


EQUAL = Outcome(Kind.EQUAL)


def refused(words: str) -> Outcome:
    return Outcome(Kind.REFUSED, words)


def told(words: str) -> Outcome:
    return Outcome(Kind.TOLD, words)


@dataclass(frozen=True)
class Program:
    """A training program as a user has it.

    Attributes:
      create: ``create(key)`` is a ``TrainState``, or a tuple of NNX objects.
      step: ``step(state, *arguments)``, or as ``call`` has it.
      batch: ``batch(rng)`` gives what the step takes beside the state: host arrays of ``ROWS``
        rows, keys, and what is static.
      once: the outcome without accumulation.
      accumulated: the outcome with four micro-batches.
      nnx: whether the state is a tuple of NNX objects, updated in place.
      jit: options of ``jax.jit``, which zerojax takes too.
      zero: options that zerojax alone takes.
      call: ``call(step, state, arguments)`` gives ``(state, results)``; None for the usual one.
      dtypes: float64, or float32 where the model insists on it; and bfloat16 for the parameters
        that the step computes with, where numbers do not hang on the last bit.
      near: tolerance under accumulation in place of that of the dtype.
      axes: mesh axes that the user's own specs name.
      specs: ``specs(params)`` gives those that are passed to ``zerojax.zero``.
      tokens: whether every array of the batch is [ROWS, tokens, ...], as the axis "seq" needs.
      step_on: ``step_on(zero)`` is the step as written for a ``Zero``, where it uses one.
    """

    name: str
    create: Callable[[jax.Array], Any]
    step: Callable[..., Any]
    batch: Callable[[np.random.Generator], tuple[Any, ...]]
    once: Outcome = EQUAL
    accumulated: Outcome = EQUAL
    nnx: bool = False
    jit: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float64", "bfloat16")
    near: float | None = None
    axes: tuple[str, ...] = ()
    specs: Callable[[Any], Any] | None = None
    tokens: bool = False
    step_on: Callable[[Any], Callable[..., Any]] | None = None


class MLP(nn.Module):
    """Two dense layers, [B, 8] -> [B, out]."""

    out: int = WIDTH

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.out)(nn.tanh(nn.Dense(WIDTH)(x)))


ROW = np.ones((1, WIDTH), np.float32)


NETWORK = MLP()


def creator(
    model: nn.Module = NETWORK,
    example: Any = ROW,
    tx: optax.GradientTransformation = ADAM,
    kind: type[TrainState] = TrainState,
    **extra: Callable[[Any], Any],
) -> Callable[[jax.Array], TrainState]:
    """``create(key)`` for a model; ``extra`` are fields made from the parameters."""

    def create(key: jax.Array) -> TrainState:
        variables = dict(model.init(key, example))
        params = variables.pop("params")
        variables |= {name: make(params) for name, make in extra.items()}
        return kind.create(apply_fn=model.apply, params=params, tx=tx, **variables)

    return create


def copied(params: Any) -> Any:
    return jax.tree.map(jnp.copy, params)


def vectors(rng: np.random.Generator) -> tuple[Any, ...]:
    """Inputs and targets of a regression, and how much each row counts."""
    return (
        {
            "x": rng.normal(size=(ROWS, WIDTH)),
            "y": rng.normal(size=(ROWS, WIDTH)),
            "mask": uneven(rng),
        },
    )


def uneven(rng: np.random.Generator) -> np.ndarray:
    """Of the four micro-batches the first counts most, and each counts."""
    mask = (rng.random(ROWS) < np.repeat([0.9, 0.5, 0.3, 0.1], ROWS // 4)).astype(np.float64)
    mask[:: ROWS // 4] = 1.0
    return mask


def labelled(rng: np.random.Generator) -> tuple[Any, ...]:
    """Inputs and class labels."""
    labels = rng.integers(WIDTH, size=ROWS, dtype=np.int32)
    return ({"x": rng.normal(size=(ROWS, WIDTH)), "label": labels},)


def keyed(batch: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The same arguments with a new key behind them."""
    return lambda rng: (*batch(rng), jax.random.key(int(rng.integers(1 << 30))))


def squared(state: TrainState, params: Any, batch: Any) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)


def regression_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    loss, grads = jax.value_and_grad(lambda p: squared(state, p, batch))(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}
