"""Entries of the tables: keys of the JSON, and notes on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from zerojax.config import kinds as k
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.kinds import ValueKind

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

    def note(self, value: object) -> "Note":
        """Returns the note of a value that the key accepts."""
        if self.treatment == "off only":
            return Note(self.path, value, "honoured", "off", value)
        holds = value if self.treatment == "honoured" else None
        return Note(self.path, value, self.treatment, self.why, holds)

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
                yield Key(path, k.ANYTHING, None, why, treatment)


_OFF_KINDS = {bool: k.FLAG, int: k.NON_NEGATIVE, float: k.NUMBER, str: k.TEXT, dict: k.OBJECT}
"""The kinds of keys that must stay off, by the type of the value that means off."""


def off_only(table: Mapping[str, Mapping[str, object]]) -> Iterator[Key]:
    """Yields keys that must stay off.

    Args:
      table: The value that means off, or a tuple of such values, by path, by reason.
    """
    for why, values in table.items():
        for path, given in values.items():
            off, *more = given if isinstance(given, tuple) else (given,)
            kind = _OFF_KINDS.get(type(off), k.ANYTHING)
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
