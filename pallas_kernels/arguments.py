"""What tests and benchmark call a kernel with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Measured:
    """A call that the benchmark times.

    Attributes:
      kernel: its name.
      shape: what it is called with, for people.
      call: ``call(implementation)`` is a function of arrays.
      arguments: trees of those arrays, abstract. On a GPU they are filled with random numbers.
      bytes: that have to be read or written once, however it is implemented.
      flops: operations, where they and not the bytes bound the time.
      in_place: positions of the arguments that the results are written over.
    """

    kernel: str
    shape: str
    call: Callable[[str], Callable[..., Any]]
    arguments: tuple[Any, ...]
    bytes: int
    flops: int = 0
    in_place: tuple[int, ...] = ()


def and_backward(call: Callable[[str], Callable[..., Any]]) -> Callable[[str], Callable[..., Any]]:
    """The same call, given also a cotangent of its result first; and its gradients."""

    def both(implementation: str) -> Callable[..., Any]:
        def run(dy: Any, *arguments: Any) -> Any:
            y, vjp = jax.vjp(call(implementation), *arguments)
            return y, vjp(dy)

        return run

    return both
