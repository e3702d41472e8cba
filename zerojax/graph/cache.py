"""Results of functions of a jaxpr, kept for as long as the jaxpr exists."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def cached_by_jaxpr(
    function: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """Caches ``function(jaxpr, *question)`` by the identity of the jaxpr and by the question.

    Programs call the same jaxpr at many places (a layer, a rematerialised block); with the cache
    the jaxpr is read once for all of them. The result must not hold the jaxpr itself, or neither is
    ever freed.

    Args:
      function: Function whose first argument is an open jaxpr, or another object that compares by
        identity; its other arguments are hashable and positional.
    """
    known: weakref.WeakKeyDictionary[object, dict[object, R]] = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    # Only for the type checker, which takes P.args with P.kwargs alone: a question is positional.
    def cached(jaxpr: Any, *question: P.args, **_: P.kwargs) -> R:
        answers = known.setdefault(jaxpr, {})
        if question not in answers:
            answers[question] = function(jaxpr, *question)  # type: ignore[call-arg]
        return answers[question]

    return cached
