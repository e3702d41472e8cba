"""The frozen configuration that all of zerojax works with once the JSON is read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from zerojax.config.batch import BatchSizes, solve
from zerojax.config.check import check_keys, sections
from zerojax.config.errors import ConfigError, as_text, closest, hint, quote_name
from zerojax.config.files import plain
from zerojax.config.keys import KEYS
from zerojax.config.named import NAMED, within
from zerojax.config.row import ZERO, Note, check_fields
from zerojax.config.sections import OFFLOAD, Section
from zerojax.config.settings import BY_FIELD, DESCRIPTIONS, SECTIONS, XLA, Settings
from zerojax.config.together import contradictions, idle


@dataclass(frozen=True, kw_only=True)
class ZeroConfig(Settings):
    """The settings of a run; every feature is off by default.

    docs/configuration.md has a table of the fields, which are those of
    :class:`zerojax.config.settings.Settings`. `notes` has one note for each key of the JSON, each
    default that changes numbers, and each keyword without effect; equality and hash ignore it.

    Raises:
      ConfigError: A wrong value or a contradiction, with the remedy.

    Example:
      >>> ZeroConfig(stage=3, gradient_accumulation_steps=4).batch(world=8)
      BatchSizes(train=None, micro=None, accumulation=4)
    """

    __doc__ = f"{__doc__}\n    Attributes:\n{DESCRIPTIONS}"

    notes: tuple[Note, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        valid, problems = check_fields(self)
        for name, cls in CLASSES.items():
            valid[name] = value = getattr(self, name)
            if value is not None and not isinstance(value, cls):
                problems.append(f"{name}: expected {cls.__name__} or None, got {as_text(value)}")
                del valid[name]
        problems += self._check_xla()
        problems += contradictions(valid)
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "steps_per_print", self.steps_per_print or None)
        largest = BY_FIELD["sub_group_size"].default
        object.__setattr__(self, "sub_group_size", self.sub_group_size or largest)
        own_notes = (note for note in self.notes if not _is_of_keyword(note))
        object.__setattr__(self, "notes", (*own_notes, *_idle_notes(valid, self.notes)))

    def _check_xla(self) -> list[str]:
        """Converts the options of XLA; returns one problem for each wrong one."""
        given = plain(self.xla) if isinstance(self.xla, Mapping) else self.xla
        values, problems = check_keys({"xla": given}, {key.path: key for key in XLA.values()})
        object.__setattr__(self, "xla", within("xla.", values, nulls=False))
        return problems

    @classmethod
    def from_keywords(cls, **keywords: Any) -> Self:
        """Builds a config from keywords; a section is a config object or a mapping as in the JSON.

        An offload section may be the name of a device: `offload_optimizer="cpu"`.

        Raises:
          ConfigError: An unknown keyword, with the closest known keyword, or a wrong value.

        Example:
          >>> ZeroConfig.from_keywords(stag=3)
          Traceback (most recent call last):
          zerojax.config.errors.ConfigError: stag: unknown keyword; did you mean `stage`?
        """
        known = [f.name for f in fields(cls) if f.name != "notes"]
        options = {name: keywords.pop(name) for name in XLA if name in keywords}
        if options and isinstance(given := keywords.get("xla", {}), Mapping):
            keywords["xla"] = {**given, **options}
        problems = [_unknown_keyword(name, known) for name in keywords if name not in known]
        for name, its_class in CLASSES.items():
            if keywords.get(name) is None:
                continue
            try:
                given, named = keywords.pop(name), NAMED.get(name)
                keywords[name] = named.of(given) if named else from_keyword(name, its_class, given)
            except ConfigError as error:
                problems.extend(error.problems)
        try:
            config = cls(**{k: v for k, v in keywords.items() if k in known})
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        return config

    @property
    def compute_dtype(self) -> str | None:
        """The compute dtype of the step's body, "fp16" or "bf16"; None for the parameters' own."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else None

    @property
    def bf16_moments(self) -> bool:
        """True if Adam's moments are stored in bfloat16."""
        return self.bf16 and self.bf16_optimizer_states

    @property
    def skips_overflow(self) -> bool:
        """True if updates whose gradient is not finite are skipped."""
        return self.fp16 or self.check_finite or (self.bf16 and self.check_grad_overflow)

    def batch(self, world: int, stages: int = 1) -> BatchSizes:
        """Returns the batch sizes on `world` data-parallel devices.

        Args:
          world: The data-parallel devices of each pipeline stage.
          stages: Pipeline stages, for the check that the sizes suit them.
        """
        return solve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world,
            stages,
        )

    def words(self, field: str) -> str:
        """Returns "key = value" for a field that one key sets, as in the file that set the field.

        Example:
          >>> ZeroConfig(mics_shard_size=2).words("mics_shard_size")
          'zero_optimization.mics_shard_size = 2'
        """
        path, value = BY_FIELD[field].path, getattr(self, field)
        for note in self.notes:
            if path in note.sets:
                why = "" if note.holds == value else f" ({note.reason})"
                return f"{note.key} = {note.value}{why}"
        return f"{path} = {as_text(value)}"

    def check_partition(self, world: int) -> None:
        """Checks that `zero_hpz_partition_size` divides `world`, the devices that shard the state.

        Raises:
          ConfigError: The partition size does not divide the number of devices.
        """
        size = self.zero_hpz_partition_size
        if size > 1 and world % size:
            divisors = [k for k in range(1, world + 1) if world % k == 0]
            raise ConfigError(
                f"{ZERO}.zero_hpz_partition_size = {size} does not divide the {world} devices over "
                f"which the state is sharded; set it to one of {', '.join(map(str, divisors))}: "
                "the GPUs of a host, as a rule; 1 is off"
            )


CLASSES: dict[str, Any] = NAMED | {name: place.cls for name, place in SECTIONS.items()}
"""The class of each field that is an object."""


def quiet(config: ZeroConfig) -> ZeroConfig:
    """Returns the config without its one-time reports, for steps only compiled or timed."""
    return replace(config, dump_state=False, autotuning=None)


def from_keyword(name: str, cls: type[Section], given: object) -> Section | None:
    """Returns the config of one section from a keyword, or None if the section is off.

    Args:
      name: The keyword.
      cls: The class of the section.
      given: The config, a mapping as in the JSON, None, or a short form: for offload the name of a
        device, for fp8 True or "emulate". The device "none" turns offload off, `enabled` false any
        other section.

    Raises:
      ConfigError: An unknown name or a wrong value, prefixed by the section.

    Example:
      >>> from zerojax.config import OffloadParam, WandbConfig
      >>> from_keyword("offload_param", OffloadParam, "cpu").device
      'cpu'
      >>> from_keyword("offload_param", OffloadParam, "none") is None
      True
      >>> from_keyword("wandb", WandbConfig, {"team": "llm"})
      WandbConfig(group=None, team='llm', project='deepspeed')
      >>> from_keyword("wandb", WandbConfig, {"enabled": False}) is None
      True
    """
    if given is None or isinstance(given, cls):
        return given
    given = cls.in_full(given)
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name}: expected {cls.__name__}, a mapping of its fields, {cls.short}or None, got "
            f"{as_text(given)}"
        )
    on: dict[str, object] = {"device": "cpu"} if name in OFFLOAD else {"enabled": True}
    keys = {key.path: key for key in cls.keys(name, "")}
    values, problems = check_keys({name: on | plain(given)}, keys)
    if problems:
        raise ConfigError(problems)
    return cls.read(name, values)


def _is_of_keyword(note: Note) -> bool:
    """Returns whether a note is on a keyword; such notes are computed anew."""
    name = note.key.partition(".")[0]
    is_keyword = note.key in BY_FIELD or name in OFFLOAD
    return is_keyword and note.status == "no effect" and note.key not in KEYS


def _idle_notes(values: Mapping[str, Any], notes: tuple[Note, ...]) -> Iterator[Note]:
    """Yields a note for each keyword without effect; keys of a JSON already have notes."""
    noted = {path for note in notes for path in (note.key, *note.sets)}
    for name, reason in idle(values).items():
        if values[name] != getattr(Settings, name) and BY_FIELD[name].path not in noted:
            yield Note(name, values[name], "no effect", reason)
    for section in OFFLOAD:
        given = values.get(section)
        for name, reason in given.idle().items() if given else ():
            value, path = getattr(given, name), f"{SECTIONS[section].path}.{name}"
            if value != getattr(type(given), name) and path not in noted:
                yield Note(f"{section}.{name}", value, "no effect", reason)


def _unknown_keyword(name: str, known: list[str]) -> str:
    for key in map(KEYS.get, (name, f"{ZERO}.{name}")):
        if key is not None and key.treatment == "off only":
            return f"{name}: not supported: {key.why}"
    if name in sections(KEYS)[""]:
        return f"{name}: a key of the JSON, not a keyword; pass the complete config as a dict"
    others = f"some are {', '.join(known[:5])}; help(zerojax.ZeroConfig) has all"
    return f"{quote_name(name)}: unknown keyword; {hint(closest(name, known), others)}"
