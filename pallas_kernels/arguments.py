"""Calls of kernels that the benchmark times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Measured:
    """A call that the benchmark times.

    Attributes:
      kernel: the name of the kernel.
      shape: a description of the arguments, for people.
      call: ``call(implementation)`` returns a function of arrays.
      arguments: trees of abstract arrays. On a GPU they are filled with random numbers.
      bytes: the number of bytes that any implementation must read or write.
      flops: the number of operations, if operations and not bytes bound the time.
    """

    kernel: str
    shape: str
    call: Callable[[str], Callable[..., Any]]
    arguments: tuple[Any, ...]
    bytes: int
    flops: int = 0


def and_backward(call: Callable[[str], Callable[..., Any]]) -> Callable[[str], Callable[..., Any]]:
    """Adds a cotangent of the result as first argument, and the gradients as second result."""

    def both(implementation: str) -> Callable[..., Any]:
        def run(dy: Any, *arguments: Any) -> Any:
            y, vjp = jax.vjp(call(implementation), *arguments)
            return y, vjp(dy)

        return run

    return both
