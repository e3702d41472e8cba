"""One row of the table of keys, and short ways to write many."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from zerojax.config.errors import shown
from zerojax.config.kinds import FLAG, TEXT, Kind, optional

Treatment = Literal["honoured", "left to XLA", "no effect", "off only"]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the table.

    Attributes:
      path: dotted, such as "zero_optimization.stage".
      kind: what the value may be.
      default: DeepSpeed's value where the JSON omits the key.
      treatment: "honoured"; "left to XLA" and "no effect" are taken and reported with `why`;
        "off only" refuses every value not in `accepts`, with `why`.
      why: what an honoured key does; of the others, the reason and the remedy.
      field: the `ZeroConfig` field that an honoured key sets.
      accepts: the values that mean "off".
      auto: how "auto" is resolved to `default`; None refuses it.
      loud: told where the JSON omits the key, whose default changes numbers; "" tells nothing.
    """

    path: str
    kind: Kind
    default: Any
    treatment: Treatment
    why: str = ""
    field: str | None = None
    accepts: tuple[Any, ...] = ()
    auto: str | None = None
    loud: str = ""


def honoured(path: str, kind: Kind, default: Any, **more: Any) -> Iterator[Key]:
    yield Key(path=path, kind=kind, default=default, treatment="honoured", **more)


def taken(section: str, treatment: Treatment, why: str, **rows: tuple[Kind, Any]) -> Iterator[Key]:
    """Keys that are accepted with any value of their kind, and reported."""
    for name, (kind, default) in rows.items():
        path = f"{section}.{name}" if section else name
        yield Key(
            path=path,
            kind=kind,
            default=default,
            treatment=treatment,
            why=why,
            auto=f"{treatment}: {why}",
        )


def off(section: str, why: str, **rows: tuple[Any, ...]) -> Iterator[Key]:
    """Keys that stay off: (kind, default, *further values that also mean off)."""
    for name, (kind, *off) in rows.items():
        path = f"{section}.{name}" if section else name
        yield Key(
            path=path,
            kind=kind,
            default=off[0],
            treatment="off only",
            why=why,
            accepts=tuple(off),
            auto=f"{shown(off[0])}: not asked for",
        )


def switched(section: str, why: str, **rows: tuple[Kind, Any]) -> Iterator[Key]:
    """A section with an `enabled` that has to be false, which leaves its other keys idle."""
    yield from off(section, why, enabled=(FLAG, False))
    yield from taken(section, "no effect", f"{section} is off", **rows)


ANYTHING = Kind("any value", Any)
FLAG_OFF = (FLAG, False)
TEXT_OR_NULL = (optional(TEXT), None)
