"""The DeepSpeed JSON derived from a YAML, and the treatment of each key of the YAML."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from zerojax.config.accelerate.check import Leaf
from zerojax.config.batch import BATCH_SIZES
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.row import Note, Status

_PROGRAM_KEYS = (*BATCH_SIZES, "gradient_clipping")
"""Keys for values that an Accelerate program sets in code: in its data loaders, in `Accelerator`,
and in `clip_grad_norm_`."""


@dataclass
class Translation:
    """The DeepSpeed JSON derived from a YAML.

    Attributes:
      leaves: Every key of the YAML, in its order.
      values: The YAML's valid values by current name.
      raw: The JSON, in plain dicts.
      file: The path of the JSON that the YAML names; "" for none.
      of_file: The original contents of that JSON; without one, the keys that are left open.
      judged: Notes on the valid keys, by current name; without a reason, the note of the first key
        of the JSON that the key sets supplies treatment and reason.
      names: YAML keys that can set a JSON key, by the JSON key, for messages.
      implied: Reasons for Accelerate's defaults, by the JSON key that they set.
      problems: Sentences, each of which begins with a key of the YAML or of the JSON.
    """

    leaves: list[Leaf]
    values: dict[str, Any]
    problems: list[str]
    raw: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    of_file: dict[str, object] = field(default_factory=dict)
    judged: dict[str, Note] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)
    # of_file's values for keys of both files
    _both: dict[str, object] = field(default_factory=dict)

    def sets(self, key: str, values: Mapping[str, object], reason: str = "") -> None:
        """Translates a key of the YAML into keys of the JSON.

        If the JSON's file has a value too, and one of the two is "auto", the other wins. Two values
        that differ are a problem, of which there is one for a key.

        Args:
          key: The key of the YAML.
          values: The values that it stands for, by dotted key of the JSON.
          reason: Its effect; "" for that of the first key of the JSON.
        """
        if all(self._put(key, path, value) for path, value in values.items()):
            self.note(key, reason, holds=self.values[key], sets=(*values,))

    def _put(self, key: str, path: str, value: object) -> bool:
        """Sets a key of the JSON; returns whether the JSON's file agrees."""
        *sections, name = path.split(".")
        target = self.raw
        for section in sections:
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                return True  # the loader reports this problem
        existing = target.get(name)
        if self.file and name in target:
            self._both[path] = existing
        if existing is None or existing == "auto":
            target[name] = value
        elif value != "auto" and _checked(path, existing) != _checked(path, value):
            self.problems.append(
                f"{key} = {as_text(self.values[key])} contradicts {path} = "
                f"{as_text(existing)} in {self.file}; remove one of them"
            )
            return False
        return True

    def note(
        self,
        key: str,
        reason: str,
        status: Status = "honoured",
        holds: object = None,
        sets: tuple[str, ...] = (),
    ) -> None:
        """Records the treatment of a key of the YAML."""
        self.judged[key] = Note(key, self.values[key], status, reason, holds, sets)

    def imply(self, path: str, value: object, reason: str) -> None:
        """Sets a key of the JSON to Accelerate's default, since no key of the YAML sets it."""
        self._put("", path, value)
        self.implied[path] = reason

    def leave_open(self, auto: Mapping[str, object]) -> None:
        """Sets keys that Accelerate takes from the program to "auto", if the caller passes values.

        Args:
          auto: Values in place of "auto", by dotted key of the JSON.
        """
        for path in () if self.file else _PROGRAM_KEYS:
            if path in auto and (path not in self.raw or path in self.implied):
                self.raw[path] = self.of_file[path] = "auto"
                self.implied.pop(path, None)

    def refuse(self, key: str, why: str) -> None:
        """Adds a problem for a value that zerojax does not support."""
        self.problems.append(f"{key} = {as_text(self.values[key])} is not supported: {why}")

    def notes(self, of_json: Iterable[Note]) -> list[Note]:
        """Returns the notes of a config: first those of the YAML's keys, then those of the JSON's.

        Args:
          of_json: The loader's notes on `raw`.
        """
        json_notes, yaml_keys = {note.key: note for note in of_json}, self.said
        notes = []
        for path, key, value in self.leaves:
            if (note := self.judged.get(key)) is None:
                continue
            if note.sets:
                if (first := json_notes.get(note.sets[0])) is None:
                    continue  # the JSON key has a problem, and so no note
                if not note.reason:
                    reason = f"{first.key}: {first.reason}"
                    note = note._replace(status=first.status, reason=reason, holds=first.holds)
            notes.append(note._replace(key=path, value=value))
        for note in of_json:
            if note.key in self.implied:
                notes.append(note._replace(status="default", reason=self.implied[note.key]))
            elif note.key in self._both and note.key in yaml_keys and note.value != "auto":
                given, reason = self._both[note.key], f"{yaml_keys[note.key]} says it"
                notes.append(note._replace(value=given, status="resolved", reason=reason))
            elif note.key in self._both or note.key not in self.said_or_implied:
                notes.append(note)
        return notes

    @property
    def said(self) -> dict[str, str]:
        """The YAML key for each JSON key that only the YAML sets."""
        return {
            json_key: path
            for path, key, _ in self.leaves
            for json_key in (self.judged[key].sets if key in self.judged else ())
            if self._both.get(json_key) in (None, "auto")
        }

    @property
    def said_or_implied(self) -> set[str]:
        """The keys of `raw` that the YAML or Accelerate's defaults set, also if in `of_file`."""
        return {path for judged in self.judged.values() for path in judged.sets} | {*self.implied}

    def in_words_of_yaml(self, problem: str) -> str:
        """Returns a problem of the JSON with the YAML's keys in place of the keys they set."""
        if problem.startswith("auto: "):
            return problem
        for path, key in (self.names | self.said).items():
            problem = re.sub(rf'(?<![\w."]){re.escape(path)}(?![\w"]|\.\w)', key, problem)
        return problem


def _checked(path: str, value: object) -> object:
    try:
        return JSON_KEYS[path].kind.check(value)
    except ConfigError:
        return value
