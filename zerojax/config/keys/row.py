"""What the tables hold: keys of the JSON, and the optimizers and schedules that it may name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zerojax.config.errors import shown
from zerojax.config.keys.value_kinds import FLAG, ValueKind

ZERO = "zero_optimization"
"""The section of the stage and of offload."""

Treatment = Literal["honoured", "left to XLA", "no effect", "off only"]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the JSON.

    Attributes:
      path: The dotted path, such as "zero_optimization.stage".
      kind: What the value may be.
      default: DeepSpeed's value where the JSON omits the key.
      treatment: "honoured"; "left to XLA" and "no effect", which accept every value of the kind and
        report `why`; "off only", which refuses every value not in `accepts`, with `why`.
      why: The effect of an honoured key; of the others, the reason and the remedy.
      field: The `ZeroConfig` field that an honoured key sets.
      accepts: The values that mean "off".
      auto: How "auto" resolves to `default`; None refuses "auto".
      loud: The note for a JSON that omits the key, whose default changes numbers; "" for no note.
    """

    path: str
    kind: ValueKind
    default: Any
    treatment: Treatment
    why: str = ""
    field: str | None = None
    accepts: tuple[Any, ...] = ()
    auto: str | None = None
    loud: str = ""


def honoured(path: str, kind: ValueKind, default: Any, **more: Any) -> Key:
    """A key that zerojax follows."""
    return Key(path=path, kind=kind, default=default, treatment="honoured", **more)


def left_to_xla(section: str, why: str, **keys: tuple[ValueKind, Any]) -> Iterator[Key]:
    """Keys, as (kind, default), whose subject the compiler decides."""
    return _accepted(section, "left to XLA", why, keys)


def no_effect(section: str, why: str, **keys: tuple[ValueKind, Any]) -> Iterator[Key]:
    """Keys, as (kind, default), that change nothing here."""
    return _accepted(section, "no effect", why, keys)


def _accepted(
    section: str, treatment: Treatment, why: str, keys: Mapping[str, tuple[ValueKind, Any]]
) -> Iterator[Key]:
    for name, (kind, default) in keys.items():
        yield Key(
            path=f"{section}.{name}" if section else name,
            kind=kind,
            default=default,
            treatment=treatment,
            why=why,
            auto=f"{treatment}: {why}",
        )


def off_only(section: str, why: str, **keys: tuple[Any, ...]) -> Iterator[Key]:
    """Keys that must stay off, as (kind, default, *further values that also mean off)."""
    for name, (kind, *off) in keys.items():
        yield Key(
            path=f"{section}.{name}" if section else name,
            kind=kind,
            default=off[0],
            treatment="off only",
            why=why,
            accepts=tuple(off),
            auto=f"{shown(off[0])}: not asked for",
        )


def off_section(section: str, why: str, **keys: tuple[ValueKind, Any]) -> Iterator[Key]:
    """A section whose `enabled` must be false, which leaves its other keys without effect."""
    yield from off_only(section, why, enabled=(FLAG, False))
    yield from no_effect(section, f"{section} is off", **keys)


REQUIRED = object()
"""The default of a parameter that has none."""


@dataclass(frozen=True)
class Param:
    """One parameter of an optimizer or a schedule.

    Attributes:
      kind: What the value may be.
      default: DeepSpeed's value, or `REQUIRED`.
      only: The supported values, where some of the kind are not.
      why: Why the others are not, with the remedy; for `REQUIRED`, why "auto" cannot be resolved.
      loud: Whether a note reports the default when a JSON omits the parameter.
      auto: The meaning of null, where "auto" means null; elsewhere "auto" is the default.
    """

    kind: ValueKind
    default: Any
    only: tuple[Any, ...] = ()
    why: str = ""
    loud: bool = False
    auto: str = ""


@dataclass(frozen=True)
class NamedType:
    """One optimizer or schedule: its parameters, or the reason for its refusal."""

    params: Mapping[str, Param] = field(default_factory=dict)
    refused: str = ""
