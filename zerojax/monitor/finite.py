"""A warning about non-finite numbers in training, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.distributed import log
from zerojax.monitor.backlog import StepQueue
from zerojax.monitor.tags import scalars
from zerojax.xla.types import PyTree

_BITS = 31


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Finiteness:
    """The non-finite numbers of a step, as the compiled step found them.

    Attributes:
      step: int32 [], the state's count of steps after this step.
      wrong: uint32 [], with bit i set if number i, counted from 0, is not finite.
      names: The names of the numbers; those from number 31 on share bit 31.
    """

    step: jax.Array
    wrong: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, step: jax.Array, grad_norm: jax.Array, out: PyTree) -> Finiteness:
        """Checks the gradient's norm and every floating scalar among a step's results.

        Args:
          step: int32 [], the state's count of steps after this step.
          grad_norm: float32 [], the global norm of the gradient.
          out: The step's results besides the state.

        Example:
          >>> Finiteness.of(jnp.int32(3), jnp.inf, {"loss": 0.5, "acc": jnp.nan}).wrong_names()
          ['grad_norm', 'acc']
        """
        numbers: dict[str, jax.typing.ArrayLike] = {"grad_norm": grad_norm}
        numbers |= {k: x for k, x in scalars(out).items() if _is_floating(x)}
        wrong = jnp.zeros((), jnp.uint32)
        for i, x in enumerate(numbers.values()):
            bit = jnp.uint32(1 << min(i, _BITS))
            wrong |= jnp.where(jnp.isfinite(x), jnp.uint32(0), bit)
        return cls(step, wrong, tuple(numbers))

    def ready(self) -> bool:
        """Returns whether the device has finished the step."""
        wrong: Any = self.wrong  # jax.Array does not declare the method
        return cast(bool, wrong.is_ready())

    def wrong_names(self) -> list[str]:
        """Returns the names of the numbers that are not finite; waits for the step."""
        wrong = int(np.asarray(self.wrong))  # several times faster than int() of a jax array
        return [name for i, name in enumerate(self.names) if wrong >> min(i, _BITS) & 1]


class FiniteWatch(StepQueue[Finiteness]):
    """A watch that warns once, about the first step with a number that is not finite.

    Steps are checked in order, each after the device has finished it.
    """

    def __init__(self) -> None:
        super().__init__(self._check)
        self._warned = False

    def _check(self, step: Finiteness) -> None:
        if not self._warned and (names := step.wrong_names()):
            self._warn(int(step.step), names)

    def _warn(self, step: int, names: list[str]) -> None:
        self._warned = True
        log.warning(
            "step %d: %s no longer finite (NaN or inf), and the update used it. Look at "
            "the batch of that step, where labels must be from 0 to the number of classes - 1, or "
            "lower the learning rate; "
            "zerojax.zero(..., check_finite=True) skips such steps and counts them. "
            "This warning is not repeated.",
            step,
            f"{', '.join(names)} {'are' if names[1:] else 'is'}",
        )


def _is_floating(x: object) -> bool:
    return isinstance(x, float) or jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating)
