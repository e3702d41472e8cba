"""Checks of the keys and values of Accelerate's YAML, one by one."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.config.accelerate.keys import KEYS, PREFIXES, RENAMED
from zerojax.config.check import sections, unknown_key
from zerojax.config.errors import ConfigError, as_text, quote_name
from zerojax.config.json_file import plain
from zerojax.config.text_file import repeated
from zerojax.config.yaml_file import read_yaml

SECTIONS = frozenset(path.partition(".")[0] for path in KEYS if "." in path)
"""The keys that contain further keys."""


class Leaf(NamedTuple):
    """One key of the file: its path as written, its current name, and its value."""

    path: str
    key: str
    value: object


class CheckResult(NamedTuple):
    """The result of `check`.

    Attributes:
      leaves: Every key in the file's order.
      values: The valid values by current name, each converted by its `ValueKind`; null and empty
        values are omitted, as if not given.
      problems: One sentence for each wrong value, unknown key and key given twice.
    """

    leaves: list[Leaf]
    values: dict[str, Any]
    problems: list[str]


def is_accelerate(raw: Mapping[str, object]) -> bool:
    """Returns whether an object has a key that only Accelerate's configs have at the top level."""
    return "distributed_type" in raw or "compute_environment" in raw


def read_checked(path: Path) -> CheckResult:
    """Checks the keys of a file that `accelerate config` wrote, YAML or JSON.

    Raises:
      ConfigError: The file cannot be read, or has no keys and values.
    """
    file = read_yaml(path)
    if not isinstance(file, dict):
        wanted = "expected keys and values, as accelerate config writes them"
        raise ConfigError(f"{wanted}, got {as_text(file)}", str(path))
    checked = check(plain(file))
    return checked._replace(problems=repeated(file) + checked.problems)


def check(file: Mapping[str, object]) -> CheckResult:
    """Checks every key separately, in one pass.

    Args:
      file: The contents of the YAML, in plain dicts.

    Example:
      >>> check({"distributed_type": False, "num_processes": "8", "num_proceses": 8})[1:]
      ({'distributed_type': 'NO', 'num_processes': 8}, \
['num_proceses: unknown key; did you mean `num_processes`?'])
    """
    checked = CheckResult(list(_leaves(file)), {}, [])
    unknown, names = [], sections(KEYS)
    for path, key, value in checked.leaves:
        if key in SECTIONS:
            if value not in (None, {}):
                checked.problems.append(f"{path}: expected an object, got {as_text(value)}")
        elif key not in KEYS:
            section, _, name = key.rpartition(".")
            unknown.append(unknown_key(section, name or path, names))
        elif key in checked.values:
            checked.problems.append(f"{path}: means the same as `{key}`; remove one of them")
        elif value is not None and value not in ({}, []):
            try:
                converted = KEYS[key].kind.check(value)
            except ConfigError as error:
                checked.problems.append(f"{path}: {error}")
            else:
                checked.values.update({key: converted} if converted is not None else {})
    return checked._replace(problems=checked.problems + unknown)


def _leaves(file: Mapping[str, object]) -> Iterator[Leaf]:
    for name, value in file.items():
        if name in SECTIONS and isinstance(value, Mapping) and value:
            for inner, each in value.items():
                path = f"{name}.{quote_name(inner)}"
                yield Leaf(path, _current_key(name, inner), each)
        else:
            yield Leaf(quote_name(name), name if "." not in name else "", value)


def _current_key(section: str, name: str) -> str:
    prefix = PREFIXES.get(section, "")
    path = f"{section}.{name if name.startswith(prefix) else prefix + name}"
    return RENAMED.get(path, path)
