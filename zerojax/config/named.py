"""The optimizer and the schedule of a config: a type and its parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from zerojax.config.errors import ConfigError, shown
from zerojax.config.families import FAMILIES, check_params, known_types, resolve_type


class FrozenParams(Mapping[str, Any]):
    """An immutable mapping that hashes by content.

    Example:
      >>> FrozenParams(lr=1e-3, betas=[0.9, 0.95])["betas"]
      (0.9, 0.95)
    """

    __slots__ = ("_items",)

    def __init__(self, *given: Mapping[str, Any], **more: Any) -> None:
        items = {k: v for mapping in (*given, more) for k, v in mapping.items()}
        self._items = {k: tuple(v) if isinstance(v, list) else v for k, v in items.items()}

    def __getitem__(self, key: str) -> Any:
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
    """A type and its parameters; only those that were given stand in `params`."""

    type: str
    params: Mapping[str, Any] = field(default_factory=FrozenParams)

    _section = ""

    def __post_init__(self) -> None:
        if not isinstance(self.type, str):
            raise ConfigError(f"{self._section}.type: expected a string, got {shown(self.type)}")
        if not isinstance(self.params, Mapping):
            raise ConfigError(
                f"{self._section}.params: expected an object, got {shown(self.params)}"
            )
        name, problems = resolve_type(self._section, self.type)
        values: dict[str, Any] = {}
        if name is not None:
            values, _, problems = check_params(self._section, name, self.params)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "type", name)
        object.__setattr__(self, "params", FrozenParams(values))

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """The same from a mapping with `type` and `params`, as in the JSON."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"{cls._section}: expected an object with type and params, got {shown(given)}"
            )
        problems = [
            f"{cls._section}.{key}: unknown key; known: type, params"
            for key in given
            if key not in ("type", "params")
        ]
        if "type" not in given:
            problems.append(f"{cls._section}.type: missing; one of {known_types(cls._section)}")
        if problems:
            raise ConfigError(problems)
        return cls(**given)

    def with_defaults(self) -> dict[str, Any]:
        """The parameters, with DeepSpeed's defaults for those not given."""
        table = FAMILIES[self._section][self.type].params
        return {name: self.params.get(name, param.default) for name, param in table.items()}


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Named):
    """An optimizer by name, with DeepSpeed's parameter names.

    Raises:
      ConfigError: an unknown type or parameter, a wrong value, or one that is not supported.

    Example:
      >>> OptimizerConfig(type="adamw", params={"lr": 3e-4}).with_defaults()["betas"]
      (0.9, 0.999)
    """

    _section = "optimizer"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(_Named):
    """A learning-rate schedule by name, with DeepSpeed's parameter names.

    Raises:
      ConfigError: an unknown type or parameter, a wrong value, or one that is not supported.

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
