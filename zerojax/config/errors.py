"""The one exception of this package, and how it shows a value."""

import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A configuration that zerojax will not run with.

    Args:
      problems: one sentence each, naming key, value and remedy.
      source: where the configuration came from, such as a file's path.

    Attributes:
      problems: the sentences, as a tuple; the message has one a line.

    Example:
      >>> print(ConfigError(["stage: expected 0, 1, 2 or 3, got 4"], "zero.json"))
      zero.json: stage: expected 0, 1, 2 or 3, got 4
    """

    def __init__(self, problems: Iterable[str] | str, source: str = "") -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.source = source
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return f"{self.source}: {self.problems[0]}" if self.source else self.problems[0]
        head = f"{self.source or 'config'}: {len(self.problems)} problems"
        return "\n  ".join([head, *self.problems])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems, self.source)


def shown(value: Any, limit: int = 60) -> str:
    """A value as it stands in JSON, cut to `limit` characters.

    Example:
      >>> shown({"enabled": True})
      '{"enabled": true}'
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = object.__repr__(value) if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
