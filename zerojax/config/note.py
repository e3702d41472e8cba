"""What became of each key of a config."""

from typing import Any, Literal, NamedTuple

Status = Literal["honoured", "left to XLA", "default", "resolved", "no effect"]


class Note(NamedTuple):
    """What became of one key.

    Attributes:
      key: its dotted path in the JSON.
      value: as given, or the default that came in its place.
      status: "honoured"; "left to XLA"; "no effect"; "default" for a number that changes the
        training though the JSON does not give it; "resolved" for an "auto".
      reason: why, for a reader.
      holds: the value in force; None where the key has none.
    """

    key: str
    value: Any
    status: Status
    reason: str
    holds: Any = None
