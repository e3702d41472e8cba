"""What became of the keys of a config, in words."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

Status = Literal["honoured", "left to XLA", "left to launch", "default", "resolved", "no effect"]


class Note(NamedTuple):
    """What became of one key of a config.

    Attributes:
      key: The dotted path in the JSON.
      value: The value given, or the default in its place.
      status: "honoured"; "left to XLA"; "left to launch"; "no effect"; "default" for an omitted key
        whose default changes numbers; "resolved" for an "auto".
      reason: The reason, for a reader.
      holds: The value in force; None where the key has none.
      sets: The keys of the JSON that it stands for, where `key` is another format's.
    """

    key: str
    value: Any
    status: Status
    reason: str
    holds: Any = None
    sets: tuple[str, ...] = ()


def elastic_notes(values: Mapping[str, Any]) -> Iterator[Note]:
    """The note that says what elasticity makes of the batch.

    Args:
      values: Right values by field of `ZeroConfig`.
    """
    if (elasticity := values.get("elasticity")) is not None:
        train, reason = elasticity.batch.train, elasticity.batch.listed()
        reason = f"rows per update, on {reason} data-parallel devices"
        yield Note("elasticity", train, "resolved", reason, train)
