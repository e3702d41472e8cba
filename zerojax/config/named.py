"""The optimizer and the schedule of a config: a type, and parameters checked against its table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from zerojax.config.check import check_keys
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.files import plain
from zerojax.config.named_types import NAMED_TYPES, type_keys, types_in


class FrozenParams(Mapping[str, Any]):
    """An immutable mapping, hashed by content, with lists as tuples.

    Example:
      >>> FrozenParams(lr=1e-3, betas=[0.9, 0.95])["betas"]
      (0.9, 0.95)
    """

    __slots__ = ("_items",)

    def __init__(self, *given: Mapping[str, object], **more: object) -> None:
        items = {k: v for mapping in (*given, more) for k, v in mapping.items()}
        self._items = {k: tuple(v) if isinstance(v, list) else v for k, v in items.items()}

    def __getitem__(self, key: str) -> object:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A type and its parameters; `params` has only parameters that were given."""

    type: str
    params: Mapping[str, Any] = FrozenParams()

    _section = ""

    def __post_init__(self) -> None:
        for name, value in self._checked({"type": self.type, "params": self.params}).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """Returns `given`, or the config from a mapping with `type` and `params` as in the JSON."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            remedy = 'write {"type": ..., "params": {...}}'
            if cls._section == "optimizer":
                remedy += ", or leave it out and pass an optax one as TrainState.create(tx=...)"
            raise ConfigError(
                f"{cls._section}: expected an object with type and params, got "
                f"{as_text(given, 40)}; {remedy}"
            )
        return cls(**cls._checked(given))

    @classmethod
    def _checked(cls, given: Mapping[str, object]) -> dict[str, Any]:
        """Returns the type and the parameters in a mapping of the form of the JSON."""
        raw = {cls._section: plain(given)}
        names, keys, problems = types_in(raw, type_keys(cls._section))
        values, more = check_keys(raw, keys)
        if problems := problems + more:
            raise ConfigError(problems)
        return {
            "type": names[cls._section],
            "params": within(f"{cls._section}.params.", values),
        }

    def with_defaults(self) -> dict[str, Any]:
        """Returns all parameters, with DeepSpeed's defaults for omitted ones."""
        table = NAMED_TYPES[self._section][self.type]
        return {name: self.params.get(name, param.default) for name, param in table.items()}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Named):
    """An optimizer by name, with DeepSpeed's parameter names.

    Raises:
      ConfigError: An unknown type or parameter, or a wrong or unsupported value.

    Example:
      >>> OptimizerConfig(type="adamw", params={"lr": 3e-4}).with_defaults()["betas"]
      (0.9, 0.999)
    """

    _section = "optimizer"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Named):
    """A learning-rate schedule by name, with DeepSpeed's parameter names.

    Raises:
      ConfigError: An unknown type or parameter, or a wrong or unsupported value.

    Example:
      >>> SchedulerConfig(type="WarmupLR", params={"warmup_num_steps": 20}).type
      'WarmupLR'
    """

    _section = "scheduler"


NAMED: dict[str, type[OptimizerConfig] | type[SchedulerConfig]] = {
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
}
"""The class of each section."""

PARAMS = tuple(f"{section}.params" for section in NAMED)
"""The keys whose values are the parameters of a type."""


def within(prefix: str, values: Mapping[str, object], *, nulls: bool = True) -> FrozenParams:
    """Returns the values whose path has a prefix, by the rest of their path.

    Args:
      prefix: The path of a section, with a dot behind.
      values: Values by dotted path.
      nulls: Whether to keep None.
    """
    inner = {p.removeprefix(prefix): v for p, v in values.items() if p.startswith(prefix)}
    return FrozenParams({name: v for name, v in inner.items() if nulls or v is not None})
