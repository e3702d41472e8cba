"""`load`: from the JSON to the frozen config, strict, with every problem reported at once."""

import os
from collections.abc import Mapping
from typing import Any

from zerojax.config import schema
from zerojax.config.errors import ConfigError, shown
from zerojax.config.families import FAMILIES, check_params, known_types, resolve_type
from zerojax.config.frozen import Note, OptimizerConfig, SchedulerConfig, Status, ZeroConfig
from zerojax.config.keys import ALIASES, KEYS, Key
from zerojax.config.read import plain, read_file

_BOTH = (
    "bfloat16 and fp16 modes cannot be simultaneously enabled: "
    "set fp16.enabled or bf16.enabled to false"
)


def load(config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig) -> ZeroConfig:
    """Reads a DeepSpeed config.

    DeepSpeed's defaults hold for what is left out, `gradient_clipping` 1.0 among them; those that
    change numbers are in `notes`, beside one note for each key given. Each "auto" is resolved or
    refused. A `ZeroConfig` is returned as it is.

    Args:
      config: the path of a JSON file, a mapping of the same form, or a `ZeroConfig`.

    Raises:
      ConfigError: with one line for each problem: the key, the value, the remedy.

    Example:
      >>> load({"zero_optimization": {"stage": 2}}).gradient_clipping
      1.0
    """
    if isinstance(config, ZeroConfig):
        return config
    source = ""
    raw: Any = config
    if isinstance(config, str | os.PathLike):
        source = os.fspath(config)
        raw = read_file(config)
    if not isinstance(raw, Mapping):
        wanted = "an object" if source else "the path of a JSON file, a mapping or a ZeroConfig"
        raise ConfigError(f"expected {wanted}, got {shown(raw)}", source)
    reader = _Reader()
    try:
        fields = reader.read(plain(raw))
        if not reader.problems:
            return ZeroConfig(**fields, notes=tuple(reader.notes))
    except RecursionError:
        reader.problems.append("nested too deeply, or within itself; it has three levels at most")
    except ConfigError as error:
        reader.problems.extend(error.problems)
    raise ConfigError(reader.problems, source)


class _Reader:
    """One pass over a config: collects fields, notes and problems."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.problems: list[str] = []

    def read(self, raw: dict[str, Any]) -> dict[str, Any]:
        self._rename(raw)
        self._take_autos(raw, "")
        self.problems += schema.check(raw)
        given = dict(_leaves(raw, ""))
        fields: dict[str, Any] = {}
        for path, key in KEYS.items():
            if path not in given or not key.kind.accepts(given[path]):
                continue
            value = key.kind.check(given[path])
            self._judge(key, value)
            if key.field:
                fields[key.field] = value
        if given.get("fp16.enabled") is True and given.get("bf16.enabled") is True:
            self.problems.append(_BOTH)
        self._defaults(given, fields)
        for section, cls in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
            if isinstance(raw.get(section), dict):
                fields[section] = self._named(section, cls, raw[section])
        return fields

    def _rename(self, raw: dict[str, Any]) -> None:
        for old, new in ALIASES.items():
            if old in raw and new in raw:
                self.problems.append(f"{old}: means the same as `{new}`; keep one of them")
                del raw[old]
            elif old in raw:
                raw[new] = raw.pop(old)

    def _take_autos(self, raw: dict[str, Any], section: str) -> None:
        """Takes each "auto" out, to leave the default in its place, or says why it cannot be."""
        for name, value in list(raw.items()):
            path = f"{section}{name}"
            if isinstance(value, dict) and path not in ("optimizer.params", "scheduler.params"):
                self._take_autos(value, f"{path}.")
            elif value == "auto" and path in KEYS:
                del raw[name]
                if (auto := KEYS[path].auto) is not None:
                    self.notes.append(Note(path, "auto", "resolved", auto))
                else:
                    default = KEYS[path].default
                    remedy = "write the value" if default is None else f"write {shown(default)}"
                    self.problems.append(f'{path}: "auto" has nothing to resolve it; {remedy}')

    def _judge(self, key: Key, value: Any) -> None:
        if key.path in ("optimizer.params", "scheduler.params"):
            return
        if key.treatment != "off only":
            self.notes.append(Note(key.path, value, key.treatment, key.why))
        elif value in key.accepts:
            self.notes.append(Note(key.path, value, "honoured", "off"))
        else:
            off = shown(key.accepts[0])
            self.problems.append(
                f"{key.path} = {shown(value)} is not supported: {key.why}; leave it out or at {off}"
            )

    def _defaults(self, given: dict[str, Any], fields: dict[str, Any]) -> None:
        resolved = {note.key for note in self.notes}
        for path, key in KEYS.items():
            if key.loud and path not in given:
                if key.field:
                    fields[key.field] = key.default
                if path not in resolved:
                    self.notes.append(Note(path, key.default, "default", key.why))

    def _named(
        self, section: str, cls: type[OptimizerConfig] | type[SchedulerConfig], raw: dict[str, Any]
    ) -> OptimizerConfig | SchedulerConfig | None:
        given, params = raw.get("type"), raw.get("params", {})
        if "type" not in raw:
            self.problems.append(f"{section}.type: missing; one of {known_types(section)}")
        if not isinstance(given, str) or not isinstance(params, dict):
            return None
        name, problems = resolve_type(section, given)
        self.problems += problems
        if name is None:
            return None
        values, autos, problems = check_params(section, name, params, json=True)
        self.problems += problems
        for key, value in values.items():
            self._note(section, key, value, "honoured", "")
        table = FAMILIES[section][name].params
        for key in autos:
            default = _default_words(section, key, table[key].default)
            self._note(section, key, "auto", "resolved", f"DeepSpeed's default, {default}")
        for key, param in table.items():
            if param.loud and key not in params:
                self._note(section, key, param.default, "default", f"DeepSpeed's for {name}")
        return None if problems else cls(type=name, params=values)

    def _note(self, section: str, key: str, value: Any, status: Status, reason: str) -> None:
        self.notes.append(Note(f"{section}.params.{key}", value, status, reason))


def _default_words(section: str, key: str, default: Any) -> str:
    if (section, key) == ("scheduler", "warmup_max_lr") and default is None:
        return "the optimizer's learning rate"
    return shown(default)


def _leaves(raw: dict[str, Any], section: str) -> list[tuple[str, Any]]:
    """The (path, value) pairs of the keys in the table that a config gives."""
    found: list[tuple[str, Any]] = []
    for name, value in raw.items():
        path = f"{section}{name}"
        if path in KEYS:
            found.append((path, value))
        elif isinstance(value, dict):
            found += _leaves(value, f"{path}.")
    return found
