"""Any JSON, and good JSON with one value changed."""

import copy
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.sampled_from([0, -1, 1.5, 2**31, 2**63, 10**400, 1e308, float("nan"), float("-inf")])
TEXTS = st.sampled_from(
    ["", "9", "../../x", "key<fry>", "\0", "\ud800", "a" * 3000, "$key", "data"]
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
) | st.integers(200, 500).map(lambda depth: _nested(depth))


def _nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = [value]
    return value


def mutated(value: Any, draw: Callable[..., Any], others: st.SearchStrategy[Any] = JSON) -> Any:
    """A copy in which one value is another one, is gone, or has another name.

    Args:
      value: Of dicts and lists.
      draw: Of hypothesis's ``data()``, or of a composite strategy.
      others: Values that stand in for others.
    """
    value = copy.deepcopy(value)
    inner = value
    while True:
        keys = [*inner] if isinstance(inner, dict) else [*range(len(inner))]
        if not keys:
            return value
        key = draw(st.sampled_from(keys))
        deeper = isinstance(inner[key], dict | list) and inner[key]
        if not (deeper and draw(st.integers(0, 3))):
            break
        inner = inner[key]
    how = draw(st.sampled_from(["other", "other", "gone", "renamed"]))
    if how == "other":
        inner[key] = copy.deepcopy(draw(others))
        return value
    old = inner.pop(key)
    if how == "renamed" and isinstance(inner, dict):
        inner[draw(TEXTS)] = old
    return value
