"""Notes on how zerojax treats the keys of a config."""

from typing import Literal, NamedTuple

Status = Literal["honoured", "left to XLA", "left to launch", "default", "resolved", "no effect"]


class Note(NamedTuple):
    """The treatment of one key of a config.

    Attributes:
      key: The dotted path in the JSON; the path in the YAML of a key of Accelerate's YAML, or the
        keyword of a setting without effect that a keyword sets.
      value: The value in the config, or the default of an omitted key.
      status: "honoured"; "left to XLA"; "left to launch"; "no effect"; "default" for an omitted key
        whose default changes numbers; "resolved" for an "auto".
      reason: The reason, as text for the user.
      holds: The effective value; None if the key has none.
      sets: The keys of the JSON that `key` stands for, if `key` is from another format.
    """

    key: str
    value: object
    status: Status
    reason: str
    holds: object = None
    sets: tuple[str, ...] = ()
