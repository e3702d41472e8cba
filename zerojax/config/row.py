"""Entries of the tables: kinds of values, keys of the JSON, and parameters of named types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple

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
      nullable: Whether null is accepted.

    Example:
      >>> SIZE.check(5e8)
      500000000
      >>> NON_NEGATIVE.check("3")
      Traceback (most recent call last):
      zerojax.config.errors.ConfigError: expected an integer of at least 0, got "3"
    """

    says: str
    annotation: Any
    nullable: bool = False

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.annotation)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the type."""
        return self._adapter.json_schema()

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
    return ValueKind(f"{kind.says} or null", kind.annotation | None, nullable=True)


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

ZERO = "zero_optimization"
"""The section of the stage and of offload."""

REQUIRED = object()
"""A marker in place of a default, for keys without one."""

Treatment = Literal["honoured", "left to XLA", "left to launch", "no effect", "off only"]


@dataclass(frozen=True)
class Key:
    """One key of the JSON.

    Attributes:
      path: The dotted path, such as "zero_optimization.stage".
      kind: The accepted values.
      default: DeepSpeed's value if the JSON omits the key; `REQUIRED` if its section needs it.
      why: The effect of an honoured key; for other keys, the reason and the remedy.
      treatment: "honoured"; "left to XLA", "left to launch" and "no effect", which accept every
        value of the kind and report `why`; "off only", which refuses every value but the default
        and `accepts`, with `why`.
      accepts: Further values that mean "off".
      auto: The reason why "auto" resolves to `default`, or to null if the kind accepts it; "" for
        the default, with the reason of the treatment; None refuses "auto".
      loud: The note for a JSON that omits the key if the default changes numbers; "" for no note.
    """

    path: str
    kind: ValueKind
    default: object
    why: str = ""
    treatment: Treatment = "honoured"
    accepts: tuple[object, ...] = ()
    auto: str | None = ""
    loud: str = ""

    def check(self, value: object) -> Any:
        """Returns a value, converted by the kind.

        Raises:
          ConfigError: The value is of another kind, or must be off.
        """
        try:
            checked = self.kind.check(value)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from None
        if self.treatment == "off only" and checked not in (self.default, *self.accepts):
            raise ConfigError(
                f"{self.path} = {as_text(checked)} is not supported: {self.why}; leave it out or "
                f"at {as_text(self.default)}"
            )
        return checked

    @property
    def resolution(self) -> str:
        """The reason why "auto" resolves to the default."""
        if self.auto or self.treatment not in ("honoured", "off only"):
            return self.auto or f"{self.treatment}: {self.why}"
        if self.treatment == "off only" or self.default is not False:
            return f"the default, {as_text(self.default)}"
        return f'off, unless the program asks for it: auto={{"{self.path}": True}}'


def setting(path: str, kind: ValueKind, default: object, why: str, **more: Any) -> Any:
    """Returns the field of a dataclass that one key of the JSON sets.

    Args:
      path: The key; its section with a dot behind, or "", if its name is that of the field.
      kind, default, why: As in `Key`.
      **more: Other attributes of the key; `keyword`, the default of the field if it is another.
    """
    own = more.pop("keyword", default)
    return field(default=own, metadata={"key": Key(path, kind, default, why, **more)})


def keys_of(cls: type, section: str = "") -> dict[str, Key]:
    """Returns the key of each field of a dataclass that one key of the JSON sets.

    Args:
      cls: The dataclass, whose fields are made by `setting`.
      section: The path of the section that it is, with a dot behind.
    """
    keys = {item.name: item.metadata["key"] for item in fields(cls) if "key" in item.metadata}
    named = {name: f"{section}{key.path}" for name, key in keys.items()}
    return {
        name: replace(keys[name], path=f"{path}{name}" if path[-1:] in (".", "") else path)
        for name, path in named.items()
    }


def check_fields(config: Any) -> tuple[dict[str, object], list[str]]:
    """Converts the fields of a new frozen dataclass by the kinds of their keys.

    Returns:
      The valid values by name, and one problem for each other field.
    """
    valid: dict[str, object] = {}
    problems = []
    for name, key in keys_of(type(config)).items():
        value = getattr(config, name)
        try:
            unset = value is None and key.default is None
            valid[name] = None if unset else key.kind.check(value)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
        else:
            object.__setattr__(config, name, valid[name])
    return valid, problems


def without_effect(treatment: Treatment, table: Mapping[str, Mapping[str, str]]) -> Iterator[Key]:
    """Yields keys that zerojax accepts at any value.

    Args:
      treatment: Of all keys.
      table: The reasons by space-separated names, by section ("" for the top level).
    """
    for section, reasons in table.items():
        for names, why in reasons.items():
            for name in names.split():
                path = f"{section}.{name}" if section else name
                yield Key(path, ANYTHING, None, why, treatment)


_OFF_KINDS = {bool: FLAG, int: NON_NEGATIVE, float: NUMBER, str: TEXT, dict: OBJECT}
"""The kinds of keys that must stay off, by the type of the value that means off."""


def off_only(table: Mapping[str, Mapping[str, object]]) -> Iterator[Key]:
    """Yields keys that must stay off.

    Args:
      table: The value that means off, or a tuple of such values, by path, by reason.
    """
    for why, values in table.items():
        for path, given in values.items():
            off, *more = given if isinstance(given, tuple) else (given,)
            kind = _OFF_KINDS.get(type(off), ANYTHING)
            yield Key(path, kind, off, why, "off only", tuple(more))


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
