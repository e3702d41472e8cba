"""`load`: strict reading of a config file into the frozen config; reports all problems at once."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerojax.config.accelerate import Translation, translate
from zerojax.config.auto import resolve_autos, stand_in
from zerojax.config.check import check_keys
from zerojax.config.errors import ConfigError
from zerojax.config.files import ENDINGS, JsonConfig, leaves, plain, read_json, source_of
from zerojax.config.frozen import ZeroConfig
from zerojax.config.keys import KEYS, rename
from zerojax.config.named import NAMED, PARAMS, within
from zerojax.config.named_types import types_in
from zerojax.config.row import Key, Note, keys_of
from zerojax.config.settings import BY_FIELD, SECTIONS
from zerojax.config.together import contradictions, idle


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
        message = "nested too deeply; a config has three levels"
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


def _source(
    config: str | os.PathLike[str] | Mapping[str, object], auto: Mapping[str, object] | None
) -> tuple[dict[str, Any], list[str], Translation | None]:
    """Returns a DeepSpeed JSON, problems of its repeated keys, and the translation from YAML."""
    raw, repeated = read_json(config)
    path = source_of(config)
    is_accelerate = "distributed_type" in raw or "compute_environment" in raw
    if not path.endswith(ENDINGS) and not is_accelerate:
        return raw, repeated, None
    try:
        yaml = translate(raw, Path(path).parent)
    except ConfigError as error:
        raise ConfigError(error.problems, path) from None
    if isinstance(auto, Mapping):
        yaml.leave_open(auto)
    return yaml.raw, repeated, yaml


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
        self.problems: list[str] = list(rename(raw))
        original = plain(raw)
        self._replaced: set[str] = set()
        if auto is not None:
            self._replaced, problems = stand_in(raw, auto)
            self.problems += problems
        names, self.keys, problems = types_in(raw, KEYS)
        self.problems += problems
        self.given: dict[str, object] = _values(original, self.keys)
        self.notes, problems = resolve_autos(raw, self.keys)
        self._values, more = check_keys(raw, self.keys, [key_of(each) for each in problems])
        self.problems += problems + more
        self.fields: dict[str, Any] = {}
        self._paths = {name: key.path for name, key in BY_FIELD.items()}
        reasons = self._note_sections()
        for section in names if not self.problems else ():
            params = within(f"{section}.params.", self._values)
            self.fields[section] = NAMED[section](type=names[section], params=params)
        self._set_fields(reasons)

    def translated_from(self, yaml: Translation) -> None:
        """Rewords notes and problems with the keys of the YAML that the JSON was derived from."""
        self.yaml = yaml
        self.raw = yaml.of_file
        self.given = _values(self.raw, self.keys)
        self.notes = [*yaml.notes(self.notes, self.given)]
        self.problems = yaml.problems + [yaml.in_words_of_yaml(each) for each in self.problems]
        if yaml.file:
            self.source += f" (deepspeed_config_file: {yaml.file})"

    def _note_sections(self) -> dict[str, str]:
        """Sets the fields of sections; returns the reasons of keys in them without effect."""
        reasons: dict[str, str] = {}
        wrong = {f"{key_of(problem)}." for problem in self.problems}
        for name, (cls, path, _) in SECTIONS.items():
            if any(key.startswith(f"{path}.") for key in wrong):
                continue
            self._paths[name] = f"{path}.{cls.switch}"
            try:
                config = cls.read(path, self._values)
            except ConfigError as error:
                self.problems += error.problems
                continue
            self.fields[name] = config
            names = [key.rpartition(".")[2] for key in keys_of(cls, f"{path}.")]
            idle = config.idle() if config else dict.fromkeys(names, f"{name} is off")
            reasons |= {f"{path}.{each}": why for each, why in idle.items() if each != cls.switch}
        return reasons

    def _set_fields(self, reasons: dict[str, str]) -> None:
        """Sets all other fields but optimizer and scheduler, from the JSON or DeepSpeed's defaults,
        and adds the notes.

        Args:
          reasons: Of keys of sections without effect, by dotted key.
        """
        wrong = {key_of(problem) for problem in self.problems}
        values = self._values
        self.fields |= {name: values.get(key.path, key.default) for name, key in BY_FIELD.items()}
        self.fields["xla"] = within("xla.", values)
        without_effect = idle(self.fields)
        for name in without_effect:  # an omitted key without effect keeps the field's default
            if BY_FIELD[name].path not in values:
                self.fields[name] = getattr(ZeroConfig, name)
        valid = {k: v for k, v in self.fields.items() if self._path(k) not in wrong}
        self.problems += contradictions(valid, self._path)
        reasons |= {BY_FIELD[name].path: reason for name, reason in without_effect.items()}
        resolved = {note.key for note in self.notes}
        noted = self.given.keys() | resolved | reasons.keys()
        for path, key in self.keys.items():
            if path in values and path not in resolved and path not in PARAMS:
                self.notes.append(self._note(key, values[path], reasons.get(path)))
            elif key.loud and path not in noted:
                self.notes.append(Note(path, key.default, "default", key.loud, key.default))

    def _path(self, field: str) -> str:
        """Returns the key of the JSON that sets a field."""
        return self._paths.get(field, field)

    def _note(self, key: Key, value: object, idle: str | None) -> Note:
        """Returns the note of a valid key; `idle` is the reason why the key has no effect."""
        if idle is not None:
            return Note(key.path, value, "no effect", idle)
        if key.path in self._replaced:
            return Note(key.path, "auto", "resolved", "given in its place, by auto=", value)
        return key.note(value)


def key_of(problem: str) -> str:
    """Returns the key that a problem begins with."""
    return min(problem.partition(": ")[0], problem.partition(" = ")[0], key=len)


def _values(raw: dict[str, object], keys: Mapping[str, Key]) -> dict[str, object]:
    """Returns the values of the known keys of a config, by dotted path."""
    each = leaves(raw, keys)
    return {path: section[path.rpartition(".")[2]] for path, section in each if path in keys}
