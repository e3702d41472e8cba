"""A DeepSpeed JSON in the making, and what became of each key that it is made from."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zerojax.config.accelerate.check import Leaf
from zerojax.config.batch import BATCH_SIZES
from zerojax.config.errors import ConfigError, shown
from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.keys import NULLABLE
from zerojax.config.notes import Note, Status

_OF_THE_PROGRAM = (*BATCH_SIZES, "gradient_clipping")
"""Batches of the loaders, arguments of `Accelerator` and of `clip_grad_norm_`."""


class Judged(NamedTuple):
    """What became of a key of the YAML.

    Attributes:
      sets: The keys of the JSON that it stands for, by dotted path.
      status, reason, holds: As in `Note`; without a reason they are those of the first of `sets`.
    """

    sets: tuple[str, ...]
    status: Status = "honoured"
    reason: str = ""
    holds: Any = None


@dataclass
class Translation:
    """The DeepSpeed JSON that a YAML comes to.

    Attributes:
      leaves: Every key of the YAML, in its order.
      values: Its right values by present name.
      raw: The JSON, in plain dicts.
      file: The path of the JSON that the YAML names; "" for none.
      of_file: What that JSON itself says.
      judged: What became of the right keys, by present name.
      names: Keys of the YAML that could say a key of the JSON, for messages.
      implied: What Accelerate does without a key, by the JSON's key: the reason.
      problems: One sentence each, which begins with a key of the YAML or of the JSON.
    """

    leaves: list[Leaf]
    values: dict[str, Any]
    problems: list[str]
    raw: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    of_file: dict[str, Any] = field(default_factory=dict)
    judged: dict[str, Judged] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    _both: dict[str, Any] = field(default_factory=dict)  # of_file's, of what the YAML says too

    def put(self, key: str, path: str, value: Any) -> bool:
        """Says `path` of the JSON by `key` of the YAML, if the JSON's file does not.

        "auto" in either gives way to the other. Two values that differ are a problem.

        Returns:
          Whether the two agree.
        """
        *sections, name = path.split(".")
        where = self.raw
        for i, section in enumerate(sections):
            if where.get(section) is None and ".".join(sections[: i + 1]) in NULLABLE:
                where[section] = {}
            where = where.setdefault(section, {})
            if not isinstance(where, dict):
                return True  # the loader names it
        there = where.get(name)
        if self.file and name in where:
            self._both[path] = there
        if there is None or there == "auto":
            where[name] = value
        elif value != "auto" and _checked(path, there) != _checked(path, value):
            self.problems.append(
                f"{key} = {shown(self.values[key])} says otherwise than {path} = {shown(there)} "
                f"in {self.file}; take one of them out"
            )
            return False
        return True

    def stands_for(self, key: str, *paths: str, reason: str = "") -> None:
        """Notes that a key of the YAML is followed as these keys of the JSON."""
        self.judged[key] = Judged(paths, "honoured", reason, self.values[key])

    def imply(self, path: str, value: Any, reason: str) -> None:
        """Says a key of the JSON that no key of the YAML says."""
        self.put("", path, value)
        self.implied[path] = reason

    def leave_open(self, auto: Mapping[str, Any]) -> None:
        """Makes "auto" of what Accelerate takes from the program, as far as the caller gives it.

        Args:
          auto: Values in place of "auto", by dotted key of the JSON.
        """
        for path in () if self.file else _OF_THE_PROGRAM:
            if path in auto and (path not in self.raw or path in self.implied):
                self.raw[path] = "auto"
                self.implied.pop(path, None)

    def refuse(self, key: str, why: str) -> None:
        """Notes a value that zerojax does not follow."""
        self.problems.append(f"{key} = {shown(self.values[key])} is not supported: {why}")

    def notes(self, of_json: Iterable[Note]) -> list[Note]:
        """The notes of a config: those of the YAML's keys, then those of the JSON's.

        Args:
          of_json: The notes that the loader made of `raw`.
        """
        there, said = {note.key: note for note in of_json}, self.said
        notes = []
        for path, key, value in self.leaves:
            if (judged := self.judged.get(key)) is None:
                continue
            sets, status, reason, holds = judged
            first = there.get(sets[0]) if sets else None
            if sets and first is None:
                continue  # something is wrong beside it
            if first and not reason:
                status, reason, holds = first.status, f"{first.key}: {first.reason}", first.holds
            notes.append(Note(path, value, status, reason, holds, sets))
        for note in of_json:
            if note.key in self.implied:
                notes.append(note._replace(status="default", reason=self.implied[note.key]))
            elif note.key in self._both and note.key in said and note.value != "auto":
                given, reason = self._both[note.key], f"{said[note.key]} says it"
                notes.append(note._replace(value=given, status="resolved", reason=reason))
            elif note.key in self._both or note.key not in self.said_or_implied:
                notes.append(note)
        return notes

    @property
    def said(self) -> dict[str, str]:
        """The YAML's key for each key of the JSON that it alone says."""
        return {
            said: path
            for path, key, _ in self.leaves
            for said in (self.judged[key].sets if key in self.judged else ())
            if self._both.get(said) in (None, "auto")
        }

    @property
    def said_or_implied(self) -> set[str]:
        """The keys of `raw` that the YAML stands for; some are in `of_file` too."""
        return {path for judged in self.judged.values() for path in judged.sets} | {*self.implied}

    def in_words_of_yaml(self, problem: str) -> str:
        """A problem of the JSON with the YAML's keys for those that the YAML said."""
        if problem.startswith("auto: "):
            return problem
        for path, key in (self.names | self.said).items():
            problem = re.sub(rf'(?<![\w."]){re.escape(path)}(?![\w"]|\.\w)', key, problem)
        return problem


def _checked(path: str, value: Any) -> Any:
    try:
        return JSON_KEYS[path].kind.check(value)
    except ConfigError:
        return value


def without(raw: Mapping[str, Any], paths: Iterable[str], section: str = "") -> dict[str, Any]:
    """The same JSON without some keys, and without the sections that are empty then.

    Example:
      >>> without({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, ["fp16.enabled"])
      {'zero_optimization': {'stage': 2}}
    """
    paths = frozenset(paths)
    rest: dict[str, Any] = {}
    for name, value in raw.items():
        path = f"{section}{name}"
        if path in paths:
            continue
        if isinstance(value, Mapping) and any(other.startswith(f"{path}.") for other in paths):
            value = without(value, paths, f"{path}.")
            if not value:
                continue
        rest[name] = value
    return rest
