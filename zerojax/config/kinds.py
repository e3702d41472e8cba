"""Kinds of values, which pydantic checks."""

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
