"""The exception for settings that zerojax refuses, and helpers that format its messages."""

import difflib
import json
import re
from collections.abc import Iterable
from itertools import islice

_LONGEST = 100
"""The most characters of a name that is compared with the known names."""

_COMPARED = 1000
"""The most known names that one name is compared with."""


class ConfigError(ValueError):
    """A configuration that zerojax refuses to run with.

    Args:
      problems: One sentence for each problem, with key, value and remedy.
      source: The file's path; "" for a mapping.

    Attributes:
      problems: The sentences, as a tuple; the message has one sentence a line.

    Example:
      >>> print(ConfigError(["stage: expected 0, 1, 2 or 3, got 4"], "zero.json"))
      zero.json: stage: expected 0, 1, 2 or 3, got 4
    """

    def __init__(self, problems: Iterable[str] | str, source: str = "") -> None:
        self.problems: tuple[str, ...] = (
            (problems,) if isinstance(problems, str) else tuple(problems)
        )
        self.source = source
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}" if self.source else self.problems[0]
        head = f"{self.source or 'config'}: {len(self.problems)} problems"
        return "\n  ".join([head, *self.problems])

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems, self.source)


def as_text(value: object, limit: int = 60) -> str:
    """Returns a value as JSON, or by its `repr`, truncated to `limit` characters.

    Example:
      >>> as_text({"enabled": True})
      '{"enabled": true}'
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = object.__repr__(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def quote_name(name: str) -> str:
    """Returns a name for use in a dotted path, quoted if a reader could misread it.

    Example:
      >>> print(quote_name("stage"), quote_name(""), quote_name("a.b"))
      stage "" "a.b"
    """
    is_plain = name and name.isprintable() and not re.search(r'[.:="]|\s', name)
    return name if is_plain and len(name) <= _LONGEST else as_text(name)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the closest known name, or all of them.

    Example:
      >>> suggestion("stag", ["stage", "bf16"])
      'did you mean `stage`?'
      >>> suggestion("xyz", ["stage", "bf16"])
      'known: stage, bf16'
    """
    return hint(closest(name, known), f"known: {', '.join(known)}")


def hint(guess: str | None, otherwise: str) -> str:
    """Returns the end of a message about an unknown name.

    Args:
      guess: The known name that may be meant, from :func:`closest`.
      otherwise: The text without a guess.

    Example:
      >>> print(hint("stage", "remove it"))
      did you mean `stage`?
    """
    return f"did you mean `{guess}`?" if guess else otherwise


def closest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that `name` most likely stands for, or None.

    Example:
      >>> closest("zero_optimisation", ["optimizer", "zero_optimization"])
      'zero_optimization'
    """
    if len(name) > _LONGEST:
        return None
    by_lower = {other.lower(): other for other in islice(known, _COMPARED)}
    name = name.lower()
    matches = difflib.get_close_matches(name, by_lower, n=1, cutoff=0.7)
    return by_lower[matches[0]] if matches else None
