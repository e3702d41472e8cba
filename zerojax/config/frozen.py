"""The frozen configuration: what every part of zerojax behind the JSON works with."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Self

from zerojax.config.batch import BatchSizes, solve
from zerojax.config.errors import ConfigError, closest, shown
from zerojax.config.families import FAMILIES, check_params, known_types, resolve_type
from zerojax.config.keys import BY_FIELD, KEYS

Status = Literal["honoured", "left to XLA", "default", "resolved", "no effect"]


class Note(NamedTuple):
    """What became of one key.

    Attributes:
      key: its dotted path in the JSON.
      value: as given, or the default that came in its place.
      status: "honoured"; "left to XLA"; "no effect"; "default" for a number that changes the
        training though the JSON does not give it; "resolved" for an "auto".
      reason: why, for a reader.
    """

    key: str
    value: Any
    status: Status
    reason: str


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


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """What zerojax is to do. Nothing happens that is not asked for here.

    Equality and hash leave `notes` out: two configs that do the same are the same.

    Attributes:
      stage: 0 (replicated), 1 (optimizer state sharded), 2 (gradients too), 3 (parameters too).
      bf16: parameters reach the step's body in bfloat16; master weights stay as they are.
      gradient_clipping: the largest global L2 norm of the averaged gradient; 0 is off.
      gradient_accumulation_steps: micro-batches per update.
      train_batch_size: rows per update, over all devices.
      train_micro_batch_size_per_gpu: rows of one device in one micro-batch.
      stage3_param_persistence_threshold: smaller parameters, in elements, stay whole.
      optimizer, scheduler: for `zero.optimizer()`.
      check_grad_overflow: skip updates that are not finite; not there yet.
      grad_accum_dtype: dtype of the sum over micro-batches; None is the gradient's own.
      notes: one for each key of the JSON, and for each default that changes numbers.

    Raises:
      ConfigError: a value that cannot be, with the remedy.

    Example:
      >>> ZeroConfig(stage=3, gradient_accumulation_steps=4).batch(world=8)
      BatchSizes(train=None, micro=None, accumulation=4)
    """

    stage: int = 0
    bf16: bool = False
    gradient_clipping: float = 0.0
    gradient_accumulation_steps: int | None = None
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    stage3_param_persistence_threshold: int = 100_000
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    check_grad_overflow: bool = False
    grad_accum_dtype: str | None = None
    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        problems = []
        for name, key in BY_FIELD.items():
            value = getattr(self, name)
            if value is None and key.default is None:
                continue
            if not key.kind.accepts(value):
                problems.append(f"{name}: expected {key.kind.says}, got {shown(value)}")
                continue
            if key.accepts and value not in key.accepts:
                problems.append(f"{name} = {shown(value)} is not supported: {key.why}")
            object.__setattr__(self, name, key.kind.check(value))
        for name, cls in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, cls):
                problems.append(f"{name}: expected {cls.__name__} or None, got {shown(value)}")
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """From keywords, with a did-you-mean; optimizer and scheduler may be mappings.

        Example:
          >>> ZeroConfig.from_keywords(stag=3)
          Traceback (most recent call last):
          zerojax.config.errors.ConfigError: stag: unknown keyword; did you mean `stage`?
        """
        known = [f.name for f in fields(cls) if f.name != "notes"]
        problems = [_unknown_keyword(name, known) for name in keywords if name not in known]
        parts: tuple[type[OptimizerConfig] | type[SchedulerConfig], ...]
        parts = (OptimizerConfig, SchedulerConfig)
        for part in parts:
            given = keywords.get(part._section)
            if given is not None:
                try:
                    keywords[part._section] = part.of(given)
                except ConfigError as error:
                    problems.extend(error.problems)
                    del keywords[part._section]
        try:
            config = cls(**{k: v for k, v in keywords.items() if k in known})
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        return config

    def batch(self, world: int) -> BatchSizes:
        """The batch sizes on `world` data-parallel devices; see `zerojax.config.batch.solve`."""
        return solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world,
        )


def _unknown_keyword(name: str, known: list[str]) -> str:
    sections = {path.split(".")[0] for path in KEYS}
    if f"{name}.enabled" in KEYS and (key := KEYS[f"{name}.enabled"]).treatment == "off only":
        return f"{name}: not supported: {key.why}"
    if guess := closest(name, known):
        return f"{name}: unknown keyword; did you mean `{guess}`?"
    if name in sections:
        return f"{name}: a key of the JSON, not a keyword; pass the whole config as a dict"
    return f"{name}: unknown keyword; known: {', '.join(known)}"
