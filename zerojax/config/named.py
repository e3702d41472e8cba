"""The optimizer and the schedule of a config: a type, and parameters checked against its table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from zerojax.config.errors import (
    ConfigError,
    as_text,
    closest,
    quote_name,
    suggestion,
)
from zerojax.config.named_types import NAMED_TYPES, REPLACED_TYPES
from zerojax.config.row import REQUIRED, Param


def or_pass(path: str) -> str:
    """Returns the remedy for an "auto" without a default."""
    return f'or pass it: auto={{"{path}": ...}}'


def known_types(section: str) -> str:
    """Returns the supported types of a section, for a message."""
    return ", ".join(NAMED_TYPES[section])


def resolve_type(section: str, given: str) -> tuple[str | None, list[str]]:
    """Returns the type in the table's spelling, matched case-insensitively, and its problems."""
    types = NAMED_TYPES[section]
    replaced = {old.lower(): new for old, new in REPLACED_TYPES.items()}
    if section == "optimizer" and (new := replaced.get(given.lower())):
        return None, [
            f"optimizer.type = {as_text(given)} is not supported: zerojax does not compress "
            f'momenta; write "{new}", and zero_quantized_gradients for less traffic'
        ]
    name = {known.lower(): known for known in types}.get(given.lower())
    if name is None:
        guess = closest(given, types)
        likely = f"did you mean {as_text(guess)}?" if guess else f"known: {known_types(section)}"
        return None, [f"{section}.type: unknown {section} {as_text(given)}; {likely}"]
    return name, []


class CheckedParams(NamedTuple):
    """The result of `check_params`.

    Attributes:
      values: The valid parameters, each converted by its `ValueKind`.
      autos: The names of parameters given as "auto", which get their defaults (or null).
      problems: One sentence for each wrong parameter.
    """

    values: dict[str, Any]
    autos: list[str]
    problems: list[str]


def check_params(
    section: str, name: str, given: Mapping[str, object], *, json: bool = False
) -> CheckedParams:
    """Checks the parameters of an optimizer or a schedule.

    Args:
      section: "optimizer" or "scheduler".
      name: The type, from `resolve_type`.
      given: The parameters.
      json: Whether the parameters come from a JSON, where "auto" is resolved and omitted parameters
        have DeepSpeed's defaults.
    """
    table = NAMED_TYPES[section][name]
    problems = [_unknown(section, str(key), name, table) for key in given if key not in table]
    checked = CheckedParams({}, [], problems)
    for key, value in given.items():
        path = f"{section}.params.{key}"
        if key not in table:
            continue
        if json and value == "auto":
            if table[key].default is REQUIRED:
                unresolved = f'"auto" cannot be resolved: {table[key].why}, {or_pass(path)}'
                checked.problems.append(f"{path}: {unresolved}")
            else:
                checked.autos.append(key)
                if table[key].auto:
                    checked.values[key] = None
            continue
        try:
            checked.values[key] = table[key].kind.check(value)
        except ConfigError as error:
            checked.problems.append(f"{path}: {error}")
    for key, param in table.items():
        path = f"{section}.params.{key}"
        if key not in given and param.default is REQUIRED:
            problem = f"{path}: {name} needs it, as {param.kind.says}"
        elif key in checked.values and param.only and checked.values[key] not in param.only:
            problem = f"{path} = {as_text(checked.values[key])} is not supported: {param.why}"
        elif json and key not in checked.values and param.only and param.default not in param.only:
            default = f"{as_text(param.default)}, DeepSpeed's default,"
            problem = f"{path} = {default} is not supported: {param.why}"
        else:
            continue
        checked.problems.append(problem)
    return checked


def _unknown(section: str, key: str, name: str, table: Mapping[str, Param]) -> str:
    path = f"{section}.params.{quote_name(key)}"
    if section == "optimizer" and key == "max_grad_norm":
        return f"{path}: not a parameter of the optimizer; use `gradient_clipping` at the top level"
    return f"{path}: unknown parameter of {name}; {suggestion(key, table)}"


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
    params: Mapping[str, Any] = field(default_factory=FrozenParams)

    _section = ""

    def __post_init__(self) -> None:
        if not isinstance(self.type, str):
            raise ConfigError(f"{self._section}.type: expected a string, got {as_text(self.type)}")
        if not isinstance(self.params, Mapping):
            raise ConfigError(
                f"{self._section}.params: expected an object, got {as_text(self.params)}"
            )
        name, problems = resolve_type(self._section, self.type)
        values: dict[str, object] = {}
        if name is not None:
            values, _, problems = check_params(self._section, name, self.params)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "type", name)
        object.__setattr__(self, "params", FrozenParams(values))

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
