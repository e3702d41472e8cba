"""One pass over a config: its fields, what became of every key, and what is wrong."""

from collections.abc import Iterator, Mapping
from typing import Any

from zerojax.config import schema
from zerojax.config.effects import contradictions, idle
from zerojax.config.errors import shown
from zerojax.config.families import FAMILIES, check_params, known_types, resolve_type
from zerojax.config.frozen import ZeroConfig
from zerojax.config.keys import BY_FIELD, KEYS, Key
from zerojax.config.monitors import MONITORS
from zerojax.config.named import NAMED, OptimizerConfig, SchedulerConfig
from zerojax.config.note import Note, Status
from zerojax.config.offload import OFFLOAD, ZERO
from zerojax.config.old_names import rename
from zerojax.config.read import plain
from zerojax.config.read_offload import read_offload
from zerojax.config.stand_in import stand_in

_PARAMS = ("optimizer.params", "scheduler.params")
_CHOSEN = tuple(f"{ZERO}.{name}" for name in OFFLOAD)
_FIT = "`zerojax.fit` or `python -m zerojax fit`"
_STOOD_IN = "given in its place, by auto="


class Reading:
    """What a config says, whether or not zerojax will run with it.

    Args:
      raw: the config, in plain dicts; taken over.
      auto: values that stand in for "auto", by dotted key.

    Attributes:
      raw: the config as given.
      given: each key of the table that the config gives, as it stands there ("auto" too).
      fields: for `ZeroConfig`; meaningful where there are no problems.
      notes: one for each key given that is known and right, and each default that changes numbers.
      problems: one sentence each, which begins with the key.

    Example:
      >>> reading = Reading({"fp16": {"enabled": "auto", "loss_scale": -1}})
      >>> reading.notes[0].reason
      'off, unless the program asks for it: auto={"fp16.enabled": True}'
      >>> reading.problems
      ['fp16.loss_scale: expected 0 (dynamic) or a number above 0 that float32 holds, got -1']
    """

    def __init__(self, raw: dict[str, Any], auto: Mapping[str, Any] | None = None) -> None:
        self.raw = plain(raw)
        self.notes: list[Note] = []
        self.fields: dict[str, Any] = {}
        self.problems: list[str] = list(rename(raw))
        self.given = dict(_leaves(raw, ""))
        self._stands_in: set[str] = set()
        if auto is not None:
            self._stands_in, problems = stand_in(raw, auto)
            self.problems += problems
        self._take_autos(raw, "")
        self.problems += schema.check(raw)
        sound = {
            path: KEYS[path].kind.check(value)
            for path, value in _leaves(raw, "")
            if KEYS[path].kind.accepts(value)
        }
        self._set_fields(sound)
        self._note_keys(sound)
        for section, cls in NAMED.items():
            if isinstance(raw.get(section), dict):
                self.fields[section] = self._named(section, cls, raw[section])

    def _take_autos(self, raw: dict[str, Any], section: str) -> None:
        """Takes each "auto" out, to leave the default in its place, or says why it cannot be."""
        for name, value in list(raw.items()):
            path = f"{section}{name}"
            if "." in name:  # unknown, whatever it looks like
                continue
            if isinstance(value, dict) and path not in _PARAMS:
                self._take_autos(value, f"{path}.")
            elif value == "auto" and path in _CHOSEN:
                del raw[name]
                self.problems.append(
                    f'{path}: "auto" takes a search with the model: {_FIT}; or write the object, '
                    "or take it out"
                )
            elif value == "auto" and path in KEYS:
                del raw[name]
                key = KEYS[path]
                if key.auto is not None:
                    holds = None if key.treatment in ("left to XLA", "no effect") else key.default
                    self.notes.append(Note(path, "auto", "resolved", key.auto, holds))
                else:
                    default = key.default
                    remedy = "write the value" if default is None else f"write {shown(default)}"
                    fit = f", or let {_FIT} choose" * (path == BY_FIELD["stage"].path)
                    self.problems.append(
                        f'{path}: "auto" has nothing to resolve it; {remedy}{fit}, {_or_pass(path)}'
                    )

    def _set_fields(self, sound: dict[str, Any]) -> None:
        """The value of every field that has a row: as given, or DeepSpeed's default."""
        for name, key in BY_FIELD.items():
            self.fields[name] = sound.get(key.path, key.default)
        for section, cls in MONITORS.items():
            if sound.get(f"{section}.enabled"):
                names = cls.__dataclass_fields__
                known = {name: sound.get(f"{section}.{name}") for name in names}
                self.fields[section] = cls(**{k: v for k, v in known.items() if v is not None})
        wrong = {problem.partition(": ")[0] for problem in self.problems}
        self._offload = read_offload(sound, self.given, wrong)
        self.fields |= self._offload.fields
        self.problems += self._offload.problems
        for name in idle(self.fields):  # a default without effect is as if it were not there
            if BY_FIELD[name].path not in sound:
                self.fields[name] = getattr(ZeroConfig, name)
        right = {k: v for k, v in self.fields.items() if self._path(k) not in wrong}
        self.problems += contradictions(right, self._path)

    def _path(self, field: str) -> str:
        """The key of the JSON that sets a field."""
        return BY_FIELD[field].path if field in BY_FIELD else self._offload.paths.get(field, field)

    def _note_keys(self, sound: dict[str, Any]) -> None:
        resolved = {note.key for note in self.notes}
        reasons = {BY_FIELD[name].path: reason for name, reason in idle(self.fields).items()}
        reasons |= self._offload.idle
        told = self.given.keys() | resolved | reasons.keys()
        for path, key in KEYS.items():
            section, _, name = path.rpartition(".")
            if section in MONITORS and name != "enabled" and section not in self.fields:
                reasons[path] = f"{section} is off"
            if section in self._offload.unjudged:
                continue
            if path in sound and path not in _PARAMS:
                self._judge(key, sound[path], reasons.get(path))
            elif key.loud and path not in told:
                self.notes.append(Note(path, key.default, "default", key.loud, key.default))

    def _judge(self, key: Key, value: Any, idle: str | None) -> None:
        if key.treatment == "off only" and value not in key.accepts:
            off = shown(key.accepts[0])
            self.problems.append(
                f"{key.path} = {shown(value)} is not supported: {key.why}; leave it out or at {off}"
            )
        elif idle is not None:
            self.notes.append(Note(key.path, value, "no effect", idle))
        elif key.path in self._stands_in:
            self.notes.append(Note(key.path, "auto", "resolved", _STOOD_IN, value))
        elif key.treatment == "honoured":
            self.notes.append(Note(key.path, value, "honoured", key.why, value))
        elif key.treatment == "off only":
            self.notes.append(Note(key.path, value, "honoured", "off", value))
        else:
            self.notes.append(Note(key.path, value, key.treatment, key.why))

    def _named(
        self, section: str, cls: type[OptimizerConfig] | type[SchedulerConfig], raw: dict[str, Any]
    ) -> OptimizerConfig | SchedulerConfig | None:
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
        self.problems += [
            f"{problem}, {_or_pass(problem.partition(':')[0])}"
            if '"auto" cannot be resolved' in problem
            else problem
            for problem in problems
        ]
        table = FAMILIES[section][name].params
        for key, value in values.items():
            if key in autos:
                continue
            if f"{section}.params.{key}" in self._stands_in:
                self._note(section, key, "auto", "resolved", _STOOD_IN, value)
            else:
                self._note(section, key, value, "honoured", f"of {name}", value)
        for key in autos:
            default = table[key].default
            reason = table[key].auto or f"DeepSpeed's default, {shown(default)}"
            self._note(section, key, "auto", "resolved", reason, values.get(key, default))
        for key, param in table.items():
            if param.loud and key not in params:
                reason = f"DeepSpeed's for {name}"
                self._note(section, key, param.default, "default", reason, param.default)
        return None if problems else cls(type=name, params=values)

    def _note(
        self, section: str, key: str, value: Any, status: Status, reason: str, holds: Any
    ) -> None:
        self.notes.append(Note(f"{section}.params.{key}", value, status, reason, holds))


def _or_pass(path: str) -> str:
    return f'or pass it: auto={{"{path}": ...}}'


def _leaves(raw: dict[str, Any], section: str) -> Iterator[tuple[str, Any]]:
    """The (path, value) pairs of the keys in the table that a config gives."""
    for name, value in raw.items():
        path = f"{section}{name}"
        if path in KEYS and "." not in name:
            yield path, value
        elif isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
