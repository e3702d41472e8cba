"""`load`: strict reading of a config file into the frozen config; reports all problems at once."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.config.accelerate import Translation, is_accelerate, translate, without
from zerojax.config.auto import resolve_autos, stand_in
from zerojax.config.errors import ConfigError, as_text, closest, hint, quote_name
from zerojax.config.frozen import ZeroConfig
from zerojax.config.json_file import JsonConfig, plain, read_json
from zerojax.config.keys import KEYS, NULLABLE, rename, sections
from zerojax.config.named import (
    NAMED,
    PARAMS,
    FrozenParams,
    OptimizerConfig,
    SchedulerConfig,
    check_params,
    known_types,
    resolve_type,
)
from zerojax.config.named_types import NAMED_TYPES
from zerojax.config.notes import Note, Status
from zerojax.config.row import ZERO, Key
from zerojax.config.settings import BY_FIELD, SECTIONS, XLA, Place
from zerojax.config.text_file import source_of
from zerojax.config.together import contradictions, idle
from zerojax.config.yaml_file import ENDINGS

_STOOD_IN = "given in its place, by auto="


def load(
    config: str | os.PathLike[str] | Mapping[str, object] | ZeroConfig,
    auto: Mapping[str, object] | None = None,
) -> ZeroConfig:
    """Reads a DeepSpeed config, or Accelerate's YAML as the equivalent DeepSpeed config.

    Omitted keys have DeepSpeed's defaults, among them `gradient_clipping` 1.0 and, with bf16,
    `check_grad_overflow`. `notes` has one note for each key in the config, and one for each default
    that changes numbers. Each "auto" is resolved or refused.

    Args:
      config: The path of a JSON, HJSON or YAML file, a mapping of the same form, or a
        `ZeroConfig`, which is returned unchanged.
      auto: Values in place of "auto", by dotted key of the JSON, such as
        `{"scheduler.params.total_num_steps": 300}`; a key that is not "auto" is an error.

    Raises:
      ConfigError: The config has problems; the message has one line for each, with the key, the
        value and the remedy.

    Example:
      >>> load({"zero_optimization": {"stage": 2}}).gradient_clipping
      1.0
      >>> load({"gradient_clipping": "auto"}, auto={"gradient_clipping": 0.5}).gradient_clipping
      0.5
    """
    if isinstance(config, ZeroConfig):
        if auto:
            raise ConfigError('auto: nothing is "auto" in a ZeroConfig; set its fields')
        return config
    reading = read(config, auto)
    if reading.problems:
        raise ConfigError(reading.problems, reading.source)
    return ZeroConfig(**reading.fields, notes=tuple(reading.notes))


def read(
    config: str | os.PathLike[str] | Mapping[str, object], auto: Mapping[str, object] | None = None
) -> "ConfigReading":
    """Reads a config that may be wrong; the result lists its problems.

    Args:
      config: The path of a JSON, HJSON or YAML file, or a mapping of the same form.
      auto: Values in place of "auto", as for `load`.

    Raises:
      ConfigError: The config is not such a file or not an object, or JSON cannot represent it.
    """
    try:
        raw, repeated, yaml = _source(config, auto)
        reading = ConfigReading(raw, auto)
    except RecursionError:
        message = "nested too deeply, or within itself; it has three levels at most"
        raise ConfigError(message, source_of(config)) from None
    reading.source = source_of(config)
    if yaml is not None:
        reading.translated_from(yaml)
    reading.problems[:0] = repeated
    return reading


def as_json(
    config: str | os.PathLike[str] | Mapping[str, object], auto: Mapping[str, object] | None = None
) -> JsonConfig:
    """Returns a config as a DeepSpeed JSON: unchanged, or translated from Accelerate's YAML.

    Args:
      config, auto: As for `read`; each "auto" stays in place.

    Example:
      >>> as_json({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}})
      JsonConfig(raw={'zero_optimization': {'stage': 3}}, problems=[])
    """
    raw, repeated, yaml = _source(config, auto)
    return JsonConfig(raw, repeated + (yaml.problems if yaml else []))


class _Source(NamedTuple):
    """A DeepSpeed JSON, problems of its repeated keys, and the translation if it came from YAML."""

    raw: dict[str, Any]
    repeated: list[str]
    yaml: Translation | None


def _source(
    config: str | os.PathLike[str] | Mapping[str, object], auto: Mapping[str, object] | None
) -> _Source:
    raw, repeated = read_json(config)
    path = source_of(config)
    if not path.endswith(ENDINGS) and not is_accelerate(raw):
        return _Source(raw, repeated, None)
    try:
        yaml = translate(raw, Path(path).parent)
    except ConfigError as error:
        raise ConfigError(error.problems, path) from None
    if isinstance(auto, Mapping):
        yaml.leave_open(auto)
    return _Source(yaml.raw, repeated, yaml)


class ConfigReading:
    """The complete reading of a config, with its problems.

    Args:
      raw: The config, in plain dicts; changed in place.
      auto: Values in place of "auto", by dotted key.

    Attributes:
      raw: A copy of the original config.
      given: The original values of the known keys, "auto" included, by dotted path.
      fields: Keywords for `ZeroConfig`; valid only if `problems` is empty.
      notes: One note for each known and valid key, and one for each default that changes numbers.
      problems: Sentences, each of which begins with the key.
      source: The config's path; "" if the config is not a file.
      yaml: The translation if the config is Accelerate's, else None. `raw` and `given` are then
        those of the JSON file that the YAML names; without one, they lack the keys that the YAML
        sets.

    Example:
      >>> reading = ConfigReading({"fp16": {"enabled": "auto", "loss_scale": -1}})
      >>> reading.notes[0].reason
      'off, unless the program asks for it: auto={"fp16.enabled": True}'
      >>> reading.problems
      ['fp16.loss_scale: expected 0 (dynamic) or a number above 0 that float32 holds, got -1']
    """

    def __init__(self, raw: dict[str, Any], auto: Mapping[str, object] | None = None) -> None:
        self.raw: dict[str, Any] = plain(raw)
        self.source: str = ""
        self.yaml: Translation | None = None
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = list(rename(raw))
        self.given: dict[str, object] = dict(_leaves(raw, ""))
        self._replaced: set[str] = set()
        if auto is not None:
            self._replaced, problems = stand_in(raw, auto)
            self.problems += problems
        self.notes: list[Note]
        self.notes, problems = resolve_autos(raw)
        self.problems += problems
        values, problems = check_keys(raw)
        self.problems += problems
        self._paths = {name: key.path for name, key in BY_FIELD.items()}
        self._idle: dict[str, str] = {}
        self._set_fields(values)
        self._note_keys(values)
        for section, cls in NAMED.items():
            if isinstance(raw.get(section), dict):
                self.fields[section] = self._named(section, cls, raw[section])

    def translated_from(self, yaml: Translation) -> None:
        """Rewords notes and problems with the keys of the YAML that the JSON was derived from."""
        self.yaml = yaml
        self.notes = yaml.notes(self.notes)
        self.problems = yaml.problems + [yaml.in_words_of_yaml(each) for each in self.problems]
        self.raw = yaml.of_file if yaml.file else without(self.raw, yaml.said_or_implied)
        self.given = dict(_leaves(self.raw, ""))
        if yaml.file:
            self.source += f" (deepspeed_config_file: {yaml.file})"

    def _set_fields(self, values: Mapping[str, object]) -> None:
        """Sets all fields but optimizer and scheduler, from the JSON or DeepSpeed's defaults."""
        wrong = {problem.partition(": ")[0] for problem in self.problems}
        for name, key in BY_FIELD.items():
            self.fields[name] = values.get(key.path, key.default)
        options = {name: values.get(key.path) for name, key in XLA.items()}
        self.fields["xla"] = FrozenParams(options)
        for name, place in SECTIONS.items():
            if not any(f"{key}.".startswith(f"{place.path}.") for key in wrong):
                self._set_section(name, place, values)
        for name in idle(self.fields):  # an omitted key without effect keeps the field's default
            if BY_FIELD[name].path not in values:
                self.fields[name] = getattr(ZeroConfig, name)
        valid = {k: v for k, v in self.fields.items() if self._path(k) not in wrong}
        self.problems += contradictions(valid, self._path)

    def _set_section(self, name: str, place: Place, values: Mapping[str, object]) -> None:
        cls, path = place.cls, place.path
        names = [item.name for item in fields(cls) if item.name != cls.switch]  # type: ignore[arg-type]
        given = {n: v for n in names if (v := values.get(f"{path}.{n}")) is not None}
        try:
            self._paths[name], on = cls.switched(path, values, self.given)
            self.fields[name] = config = None if on is None else cls(**on, **given)
        except ConfigError as error:
            self.problems += (
                each if each.startswith(ZERO) else f"{path}.{each}" for each in error.problems
            )
            return
        reasons = config.idle() if config else dict.fromkeys(names, f"{name} is off")
        self._idle |= {f"{path}.{each}": reason for each, reason in reasons.items()}

    def _path(self, field: str) -> str:
        """Returns the key of the JSON that sets a field."""
        return self._paths.get(field, field)

    def _note_keys(self, values: Mapping[str, object]) -> None:
        resolved = {note.key for note in self.notes}
        reasons = {BY_FIELD[name].path: reason for name, reason in idle(self.fields).items()}
        reasons |= self._idle
        noted = self.given.keys() | resolved | reasons.keys()
        for path, key in KEYS.items():
            if path in values and path not in PARAMS:
                self._judge(key, values[path], reasons.get(path))
            elif key.loud and path not in noted:
                self.notes.append(Note(path, key.default, "default", key.loud, key.default))

    def _judge(self, key: Key, value: object, idle: str | None) -> None:
        """Adds a note or a problem for a key; `idle` is the reason why the key has no effect."""
        if key.treatment == "off only" and value not in key.accepts:
            off = as_text(key.accepts[0])
            self.problems.append(
                f"{key.path} = {as_text(value)} is not supported: {key.why}; leave it out "
                f"or at {off}"
            )
        elif idle is not None:
            self.notes.append(Note(key.path, value, "no effect", idle))
        elif key.path in self._replaced:
            self.notes.append(Note(key.path, "auto", "resolved", _STOOD_IN, value))
        elif key.treatment == "honoured":
            self.notes.append(Note(key.path, value, "honoured", key.why, value))
        elif key.treatment == "off only":
            self.notes.append(Note(key.path, value, "honoured", "off", value))
        else:
            self.notes.append(Note(key.path, value, key.treatment, key.why))

    def _named(
        self,
        section: str,
        cls: type[OptimizerConfig] | type[SchedulerConfig],
        raw: dict[str, object],
    ) -> OptimizerConfig | SchedulerConfig | None:
        """Returns the optimizer or the schedule, or None if the section has a problem."""
        given, params = raw.get("type"), raw.get("params", {})
        if "type" not in raw and f"{section}.type" not in self.given:
            self.problems.append(f"{section}.type: missing; one of {known_types(section)}")
        if not isinstance(given, str) or not isinstance(params, dict):
            return None
        name, problems = resolve_type(section, given)
        self.problems += problems
        if name is None:
            return None
        values, autos, problems = check_params(section, name, params, json=True)
        self.problems += problems
        table = NAMED_TYPES[section][name]
        for key, value in values.items():
            if key in autos:
                continue
            if f"{section}.params.{key}" in self._replaced:
                self._note(section, key, "auto", "resolved", _STOOD_IN, value)
            else:
                self._note(section, key, value, "honoured", f"of {name}", value)
        for key in autos:
            default = table[key].default
            reason = table[key].auto or f"DeepSpeed's default, {as_text(default)}"
            self._note(section, key, "auto", "resolved", reason, values.get(key, default))
        for key, param in table.items():
            if param.loud and key not in params:
                reason = f"DeepSpeed's for {name}"
                self._note(section, key, param.default, "default", reason, param.default)
        return None if problems else cls(type=name, params=values)

    def _note(
        self, section: str, key: str, value: object, status: Status, reason: str, holds: object
    ) -> None:
        self.notes.append(Note(f"{section}.params.{key}", value, status, reason, holds))


def _leaves(raw: dict[str, object], section: str) -> Iterator[tuple[str, object]]:
    """Yields the known keys of a config, as (path, value)."""
    for name, value in raw.items():
        path = f"{section}{name}"
        if path in KEYS and "." not in name:
            yield path, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{path}.")


class CheckedKeys(NamedTuple):
    """The result of `check_keys`.

    Attributes:
      values: The valid values by dotted path, each converted by its `ValueKind`.
      problems: One sentence for each wrong value, then for each unknown key.
    """

    values: dict[str, Any]
    problems: list[str]


def check_keys(raw: dict[str, object]) -> CheckedKeys:
    """Checks every key of a config in one pass.

    Args:
      raw: The config, in plain dicts with string keys, free of "auto".

    Example:
      >>> check_keys({"bf16": {"enabled": True}, "zero_optimization": {"stage": 4}})
      CheckedKeys(values={'bf16.enabled': True}, \
problems=['zero_optimization.stage: expected 0, 1, 2 or 3, got 4'])
    """
    values: dict[str, object] = {}
    problems: list[str] = []
    unknown: list[str] = []

    def visit(section: str, given: dict[str, object]) -> None:
        names = sections()[section]
        for name in (name for name in names if name in given):
            path, value = f"{section}.{name}" if section else name, given[name]
            if path in KEYS:
                try:
                    values[path] = KEYS[path].kind.check(value)
                except ConfigError as error:
                    problems.append(f"{path}: {error}")
            elif isinstance(value, dict):
                visit(path, value)
            elif value is not None or path not in NULLABLE:
                problems.append(
                    f"{path}: expected an object, got {as_text(value)}{_as_object(path, value)}"
                )
        unknown.extend(_unknown_key(section, name) for name in given if name not in names)

    visit("", raw)
    return CheckedKeys(values, problems + unknown)


def _unknown_key(section: str, name: str) -> str:
    """Returns the problem of an unknown key: the closest known key, or where the key belongs."""
    path = f"{section}.{quote_name(name)}" if section else quote_name(name)
    if name == "max_grad_norm":
        return f"{path}: unknown key; use `gradient_clipping` at the top level"
    full = f"{section}.{name}" if section else name
    if full in KEYS or full in sections():
        outer, _, inner = name.partition(".")
        return f'{path}: sections are objects; write {{"{outer}": {{"{inner}": ...}}}}'
    siblings = sections()[section]
    elsewhere = [p for p in [*KEYS, *sections()] if p.rpartition(".")[2] == name]
    elsewhere += [
        f"{outer}.params.{name}"
        for outer, types in NAMED_TYPES.items()
        if any(name in params for params in types.values())
    ]
    plurals = {f"{name}s", name.removesuffix("s")} & {*siblings} - {name}
    if elsewhere and len(elsewhere) <= 3 and not plurals:
        return f"{path}: unknown key here; it belongs at `{'` or `'.join(elsewhere)}`"
    known_here = f" (known here: {', '.join(siblings)})" if len(siblings) <= 8 else ""
    return f"{path}: unknown key; {hint(_guess(section, name), f'take it out{known_here}')}"


def _as_object(path: str, value: object) -> str:
    """Returns advice for a section that has the value of its switch or device."""
    for key in (f"{path}.enabled", f"{path}.device"):
        if key in KEYS and isinstance(value, bool if key.endswith("enabled") else str):
            return f'; write {{"{key.rpartition(".")[2]}": {as_text(value)}}}'
    return ""


def _guess(section: str, name: str) -> str | None:
    """Returns the closest known path, in the same section if possible, else in any."""
    if guess := closest(name, sections()[section]):
        return f"{section}.{guess}" if section else guess
    leaves = {path.rpartition(".")[2]: path for path in reversed(list(KEYS))}
    return leaves.get(closest(name, leaves) or "")
