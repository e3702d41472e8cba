"""Entries of the tables: kinds of values, keys of the JSON, and parameters of named types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from zerojax.config.errors import ConfigError, as_text


@dataclass(frozen=True)
class ValueKind:
    """A type that pydantic checks, and its name in a message.

    Attributes:
      says: The text after "expected" in an error.
      annotation: The type for pydantic.

    Example:
      >>> SIZE.check(5e8)
      500000000
      >>> NON_NEGATIVE.check("3")
      Traceback (most recent call last):
      zerojax.config.errors.ConfigError: expected an integer of at least 0, got "3"
    """

    says: str
    annotation: Any

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.annotation)

    def check(self, value: object) -> Any:
        """Returns the value converted to the type: a list of two numbers to a tuple, 5e8 to an int.

        Raises:
          ConfigError: The value is of another type; the message is "expected ..., got ...",
            without the key.
        """
        try:
            return self._adapter.validate_python(value)
        except ValidationError:
            raise ConfigError(f"expected {self.says}, got {as_text(value)}") from None


def _integral_to_int(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spelled_bool(value: object) -> object:
    words = {"true": True, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def optional(kind: ValueKind) -> ValueKind:
    """Returns a kind that also accepts null."""
    return ValueKind(f"{kind.says} or null", kind.annotation | None)


def choice(*names: str) -> ValueKind:
    """Returns a kind that accepts only the listed strings."""
    return ValueKind("one of " + ", ".join(f'"{n}"' for n in names), Literal[names])


def _float32(value: float) -> float:
    if value and not 2.0**-126 <= value <= _FLOAT32_MAX:
        raise ValueError("float32 does not hold it")
    return value


_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
_INT32_MAX = 2**31 - 1

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Beta = Annotated[_Number, Field(ge=0, lt=1)]


def _number(says: str, *more: Any, **bounds: Any) -> ValueKind:
    return ValueKind(says, Annotated[_Number, Field(**bounds), *more])


def _integer(says: str, *more: Any, **bounds: Any) -> ValueKind:
    return ValueKind(says, Annotated[int, Field(strict=True, **bounds), *more])


# Some guides write "true" in quotes, which DeepSpeed's pydantic accepts.
FLAG = ValueKind("true or false", Annotated[StrictBool, BeforeValidator(_spelled_bool)])
ANYTHING = ValueKind("any value", Any)
TEXT = ValueKind("a string", StrictStr)
OBJECT = ValueKind("an object", dict[str, Any])
INTEGER = _integer("an integer")
NON_NEGATIVE = _integer("an integer of at least 0", ge=0)
POSITIVE = _integer("an integer of at least 1", ge=1)
BUFFERS = _integer("an integer of at least 2", ge=2)
GROUP = _integer("-1 (off) or a number of devices", ge=-1)
STAGE = _integer("0, 1, 2 or 3", ge=0, le=3)
POWER = _integer("an integer from 0 to 126", ge=0, le=126)
# Sizes are often written 5e8, which JSON reads as a float.
_FLOATS_TOO = BeforeValidator(_integral_to_int)
SIZE = _integer("an integer of at least 0 (5e8 will do)", _FLOATS_TOO, ge=0)
# Counters on the device are int32.
COUNT = _integer(f"an integer from 1 to {_INT32_MAX}", _FLOATS_TOO, ge=1, le=_INT32_MAX)
NUMBER = _number("a finite number")
AMOUNT = _number("a finite number of at least 0", ge=0)
ABOVE_ZERO = _number("a finite number above 0", gt=0)
FRACTION = _number("a number from 0 to 1", ge=0, le=1)
# Loss scales are float32 on the device.
_FLOAT32 = AfterValidator(_float32)
SCALE = _number("a number above 0 that float32 holds", _FLOAT32, gt=0)
SCALE_OR_ZERO = _number("0 (dynamic) or a number above 0 that float32 holds", _FLOAT32, ge=0)
BETA = _number("a number from 0 to below 1", ge=0, lt=1)
BETAS = ValueKind(
    "two numbers from 0 to below 1, as [0.9, 0.999]",
    Annotated[tuple[_Beta, _Beta], BeforeValidator(_as_tuple)],
)
DTYPE = choice("fp32", "bf16", "fp16")

# Common pairs of a kind and its default.
FLAG_OFF = (FLAG, False)
TEXT_OR_NULL = (optional(TEXT), None)

OFF = "off: not asked for"
"""The reason why "auto" turns a switch off."""

ZERO = "zero_optimization"
"""The section of the stage and of offload."""

Treatment = Literal["honoured", "left to XLA", "left to launch", "no effect", "off only"]


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the JSON.

    Attributes:
      path: The dotted path, such as "zero_optimization.stage".
      kind: The accepted values.
      default: DeepSpeed's value if the JSON omits the key.
      treatment: "honoured"; "left to XLA", "left to launch" and "no effect", which accept every
        value of the kind and report `why`; "off only", which refuses every value not in `accepts`,
        with `why`.
      why: The effect of an honoured key; for other keys, the reason and the remedy.
      field: The `ZeroConfig` field that an honoured key sets.
      accepts: The values that mean "off".
      auto: The reason why "auto" resolves to `default`; None refuses "auto".
      loud: The note for a JSON that omits the key if the default changes numbers; "" for no note.
    """

    path: str
    kind: ValueKind
    default: object
    treatment: Treatment
    why: str = ""
    field: str | None = None
    accepts: tuple[object, ...] = ()
    auto: str | None = None
    loud: str = ""


def honoured(path: str, kind: ValueKind, default: object, why: str = "", **more: Any) -> Key:
    """Returns a key that zerojax supports; without `auto`, "auto" is DeepSpeed's default."""
    reason = OFF if default is False else f"DeepSpeed's default, {as_text(default)}"
    values: dict[str, Any] = {"auto": reason} | more
    return Key(path=path, kind=kind, default=default, treatment="honoured", why=why, **values)


def setting(path: str, kind: ValueKind, default: object, why: str, **more: Any) -> Key:
    """Returns a key that sets the field of its name; `enabled` sets that of its section's name."""
    section, _, name = path.rpartition(".")
    return honoured(path, kind, default, why, field=section if name == "enabled" else name, **more)


def left_to_xla(section: str, why: str, names: str) -> Iterator[Key]:
    """Yields keys, from space-separated names, for settings that XLA chooses itself."""
    return _accepted(section, "left to XLA", why, dict.fromkeys(names.split(), (ANYTHING, None)))


def left_to_launch(section: str, why: str, **keys: tuple[ValueKind, object]) -> Iterator[Key]:
    """Yields keys, from (kind, default), that control how processes start."""
    return _accepted(section, "left to launch", why, keys)


def no_effect(section: str, why: str, names: str = "", **defaults: object) -> Iterator[Key]:
    """Yields keys that have no effect in zerojax at any value: space-separated names, whose default
    is null, and names with their defaults."""
    values = dict.fromkeys(names.split()) | defaults
    return _accepted(section, "no effect", why, {k: (ANYTHING, x) for k, x in values.items()})


def _accepted(
    section: str, treatment: Treatment, why: str, keys: Mapping[str, tuple[ValueKind, object]]
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
    """Yields keys that must stay off, from (kind, default, *further values that also mean off)."""
    for name, (kind, *off) in keys.items():
        yield Key(
            path=f"{section}.{name}" if section else name,
            kind=kind,
            default=off[0],
            treatment="off only",
            why=why,
            accepts=tuple(off),
            auto=f"{as_text(off[0])}: not asked for",
        )


def off_section(section: str, why: str, names: str = "") -> Iterator[Key]:
    """Yields keys of a section whose `enabled` must be false, so that the others have no effect."""
    yield from off_only(section, why, enabled=(FLAG, False))
    yield from no_effect(section, f"{section} is off", names)


REQUIRED = object()
"""A marker in place of a default, for parameters without one."""


@dataclass(frozen=True)
class Param:
    """One parameter of an optimizer or a schedule.

    Attributes:
      kind: The accepted values.
      default: DeepSpeed's value, or `REQUIRED`.
      only: The supported values, if some values of the kind are not supported.
      why: The reason why other values are not supported, with the remedy; for `REQUIRED`, the
        reason why "auto" cannot be resolved.
      loud: Whether a note reports the default if a JSON omits the parameter.
      auto: The meaning of null, if "auto" means null; if "", "auto" is the default.
    """

    kind: ValueKind
    default: object
    only: tuple[object, ...] = ()
    why: str = ""
    loud: bool = False
    auto: str = ""
