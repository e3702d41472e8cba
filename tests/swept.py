"""Values of ``pytest.mark.parametrize`` of which few are in the fast tier."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def swept(values: Iterable[Any], fast: Callable[..., bool] | int = 1) -> list[Any]:
    """The values, most of them in the sweep; tuples are for several arguments.

    Args:
      values: As for ``pytest.mark.parametrize``.
      fast: Which of them stay in the fast tier: so many first ones, or those that it is true of.
    """

    def stays(i: int, value: tuple[Any, ...]) -> bool:
        return i < fast if isinstance(fast, int) else fast(*value)

    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*value, marks=() if stays(i, value) else pytest.mark.sweep)
        for i, value in enumerate(several)
    ]
