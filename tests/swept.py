"""Values for ``pytest.mark.parametrize``, most of them in the sweep."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def swept(values: Iterable[Any], fast: Callable[..., bool] | int = 1) -> list[Any]:
    """The values, marked; a tuple has one value for each of several arguments.

    Args:
      values: As for ``pytest.mark.parametrize``.
      fast: The number of leading values in the fast tier, or a predicate of those.
    """

    def stays(i: int, value: tuple[Any, ...]) -> bool:
        return i < fast if isinstance(fast, int) else fast(*value)

    several = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*value, marks=() if stays(i, value) else pytest.mark.sweep)
        for i, value in enumerate(several)
    ]
