"""A config as a table: every key, its effective value, and how zerojax treats the key."""

import os
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from zerojax.config.accelerate import KEYS as YAML_KEYS
from zerojax.config.accelerate import SECTIONS
from zerojax.config.batch import BATCH_SIZES, BatchSizes, devices_of_stage, solve
from zerojax.config.check import sections
from zerojax.config.errors import ConfigError, quote_name
from zerojax.config.keys import KEYS, renamed
from zerojax.config.load import ConfigReading, key_of, read
from zerojax.config.named import PARAMS
from zerojax.config.row import REQUIRED, ZERO, Status

TRIANGLE = dict(zip(BATCH_SIZES, BatchSizes._fields, strict=True))
"""The field of `BatchSizes` for each batch-size key."""

NOT_GIVEN = object()
"""The value of `Row.given` for a key that the config omits."""

Became = Status | Literal["refused", "wrong", "not judged"]

_SECTIONS = sections(KEYS)


class Row(NamedTuple):
    """The treatment of one key.

    Attributes:
      key: The dotted path, as the config writes it.
      given: The value in the config, or `NOT_GIVEN`.
      resolved: The effective value; None if the key has none or the batch decides.
      became: A `Note.status`; "refused" for a setting that zerojax does not support, "wrong" for
        any other problem, "not judged" if the treatment depends on a wrong key.
      why: The reason, with the remedy for a problem.
    """

    key: str
    given: object
    resolved: object
    became: Became
    why: str


class Explanation(NamedTuple):
    """The rows of a config, and its problems as in `ConfigError.problems`."""

    rows: tuple[Row, ...]
    problems: tuple[str, ...]


def explain(
    config: str | os.PathLike[str] | Mapping[str, object],
    *,
    auto: Mapping[str, object] | None = None,
    devices: int | None = None,
    every: bool = False,
) -> Explanation:
    """Explains the treatment of every key of a config, whether or not the config would load.

    Rows follow the config's order; after them come the defaults that change numbers.

    Args:
      config: The path of a JSON, HJSON or YAML file, or a mapping of the same form.
      auto: Values in place of "auto", as for `load`.
      devices: The number of data-parallel devices, of all pipeline stages, for which to compute the
        batch sizes.
      every: Whether to add a row for each known key that the config omits.

    Raises:
      ConfigError: The file cannot be read.

    Example:
      >>> rows, problems = explain({"bf16": {"enabled": True}, "train_batch_size": 64}, devices=8)
      >>> [(row.key, row.resolved, row.became) for row in rows][:3]
      [('bf16.enabled', True, 'honoured'), ('train_batch_size', 64, 'honoured'), \
('bf16.check_grad_overflow', True, 'default')]
      >>> [(row.key, row.resolved) for row in rows][3:]
      [('gradient_clipping', 1.0), ('train_micro_batch_size_per_gpu', 8), \
('gradient_accumulation_steps', 1)]
    """
    reading = read(config, auto)
    problems = list(reading.problems)
    sizes = None
    if devices is not None:
        try:
            stages = reading.fields["pipeline_stages"] or 1
            train, micro, accumulation = (reading.fields[name] for name in TRIANGLE)
            world = devices_of_stage(devices, stages)
            sizes = solve(train, micro, accumulation, world, stages)
        except ConfigError as error:
            problems += error.problems
    table = _Table(reading, problems, sizes, devices)
    rows: list[Row] = []
    listed: set[str] = set()
    if yaml := reading.yaml:
        for path, key, value in yaml.leaves:
            is_known = key in YAML_KEYS or key in SECTIONS
            rows.append(table.row(path, key, value, is_known, key not in yaml.values))
        listed = {*yaml.said}
    for path, value in _leaves(reading.raw, ""):
        key = f"{ZERO}.stage" if path == ZERO and isinstance(value, bool) else renamed(path)
        is_known = key in KEYS or key in _SECTIONS or key.startswith(PARAMS)
        rows.append(table.row(path, key, value, is_known, value in ({}, None)))
    listed |= {renamed(row.key) for row in rows}
    rows += [row for row in table.defaults() if row.key not in listed]
    if every:
        listed |= {row.key for row in rows}
        rows += [row for row in table.known() if row.key not in listed]
    return Explanation(tuple(rows), tuple(problems))


class _Table:
    def __init__(
        self,
        reading: ConfigReading,
        problems: list[str],
        sizes: BatchSizes | None,
        devices: int | None,
    ) -> None:
        self.reading, self.sizes, self.devices = reading, sizes, devices
        self.notes = {note.key: note for note in reading.notes}
        self.wrong = {key_of(problem): problem for problem in reversed(problems)}

    def row(self, path: str, key: str, value: object, is_known: bool, is_empty: bool) -> Row:
        """Returns the row of a key that the config has, whose current name is `key`."""
        if problem := self.wrong.get(path) or self.wrong.get(key):
            _, is_refused, why = problem.partition(" is not supported: ")
            why = why or problem.removeprefix(key_of(problem)).lstrip(" :=")
            return Row(path, value, None, "refused" if is_refused else "wrong", why)
        if note := self.notes.get(path) or self.notes.get(key):
            size = self._size(key) if note.status == "resolved" else None
            holds, why = (note.holds, note.reason) if size is None else (size, self._solved(key))
            return Row(path, value, holds, note.status, why)
        if not is_known:
            return Row(path, value, None, "wrong", "unknown; remove it")
        if is_empty:
            return Row(path, value, None, "no effect", "it is empty: the defaults hold")
        why = "it depends on a key that is wrong: set that one right first"
        return Row(path, value, None, "not judged", why)

    def _size(self, key: str) -> int | None:
        return getattr(self.sizes, TRIANGLE.get(key, ""), None)

    def defaults(self) -> Iterator[Row]:
        """Yields rows of defaults that change numbers and of batch sizes derived from others."""
        for note in self.reading.notes:
            if note.key not in self.reading.given:
                yield Row(note.key, NOT_GIVEN, note.holds, note.status, note.reason)
        for key in TRIANGLE:
            if (size := self._size(key)) is not None:
                yield Row(key, NOT_GIVEN, size, "resolved", self._solved(key))

    def _solved(self, key: str) -> str:
        return f"{KEYS[key].why}: from the others, on {self.devices} devices"

    def known(self) -> Iterator[Row]:
        """Yields a row for every known key, with its default."""
        for path, key in self.reading.keys.items():
            if path in PARAMS:
                continue
            if key.treatment == "off only":
                why = f"the only choice: {key.why}"
            else:
                why = f"{key.treatment}: {key.why}" if key.why else key.treatment
            default = None if key.default is REQUIRED else key.default
            yield Row(path, NOT_GIVEN, default, "default", why)


def _leaves(raw: Mapping[str, object], section: str) -> Iterator[tuple[str, object]]:
    """Yields each (path, value) of a config, down to the keys of the table."""
    for name, value in raw.items():
        path = f"{section}{quote_name(name)}"
        key = renamed(path)
        is_section = key in _SECTIONS or key in PARAMS
        if isinstance(value, Mapping) and value and is_section:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value
