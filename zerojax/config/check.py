"""Checks of the keys of a JSON, one by one, against a table."""

from collections.abc import Collection, Mapping
from typing import Any

from zerojax.config.errors import ConfigError, as_text, closest, hint, quote_name
from zerojax.config.named_types import NAMED_TYPES
from zerojax.config.row import REQUIRED, Key
from zerojax.config.sections import NULLABLE


def sections(keys: Collection[str]) -> dict[str, list[str]]:
    """Returns the names in each section, nested sections included, by path; "" is the top level."""
    names_by_section: dict[str, list[str]] = {"": []}
    for path in keys:
        names = path.split(".")
        for depth, name in enumerate(names):
            parent = ".".join(names[:depth])
            siblings = names_by_section.setdefault(parent, [])
            if name not in siblings:
                siblings.append(name)
    return names_by_section


def check_keys(
    raw: Mapping[str, object], keys: Mapping[str, Key], reported: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Checks every key of a config in one pass; returns the valid values by dotted path, each
    converted by its `ValueKind`, and one problem for each wrong, missing or unknown key.

    Args:
      raw: The config, in plain dicts with string keys, free of "auto".
      keys: The known keys, by dotted path.
      reported: Keys whose problem is known, and which `raw` lacks.

    Example:
      >>> from zerojax.config.keys import KEYS
      >>> check_keys({"bf16": {"enabled": True}, "zero_optimization": {"stage": 4}}, KEYS)
      ({'bf16.enabled': True}, \
['zero_optimization.stage: expected 0, 1, 2 or 3, got 4'])
    """
    names_by_section = sections(keys)
    values: dict[str, object] = {}
    problems: list[str] = []
    unknown: list[str] = []
    seen = set(reported)

    def visit(section: str, given: Mapping[str, object]) -> None:
        names = names_by_section[section]
        for name in (name for name in names if name in given):
            path, value = f"{section}.{name}" if section else name, given[name]
            seen.add(path)
            if path in keys:
                try:
                    values[path] = keys[path].check(value)
                except ConfigError as error:
                    problems.append(str(error))
            elif isinstance(value, dict):
                visit(path, value)
            elif value is not None or path not in NULLABLE:
                advice = _as_object(path, value, keys)
                problems.append(f"{path}: expected an object, got {as_text(value)}{advice}")
        unknown.extend(unknown_key(section, n, names_by_section) for n in given if n not in names)

    visit("", raw)
    for path, key in keys.items():
        section = path.partition(".")[0]
        if key.default is REQUIRED and path not in seen and isinstance(raw.get(section), dict):
            problems.append(f"{path}: missing; expected {key.kind.says}")
    return values, problems + unknown


def unknown_key(section: str, name: str, names_by_section: Mapping[str, list[str]]) -> str:
    """Returns the problem of an unknown key: the closest known key, or where the key belongs."""
    path = f"{section}.{quote_name(name)}" if section else quote_name(name)
    if name == "max_grad_norm":
        return f"{path}: unknown key; use `gradient_clipping` at the top level"
    known = [f"{s}.{n}" if s else n for s, names in names_by_section.items() for n in names]
    full = f"{section}.{name}" if section else name
    if full in known:
        outer, _, inner = name.partition(".")
        return f'{path}: sections are objects; write {{"{outer}": {{"{inner}": ...}}}}'
    siblings = names_by_section[section]
    elsewhere = {p for p in known if p.rpartition(".")[2] == name} | {
        f"{outer}.params.{name}"
        for outer, types in NAMED_TYPES.items()
        if any(name in params for params in types.values()) and outer in known
    }
    elsewhere.discard(full)  # it may be a parameter of another type
    plurals = {f"{name}s", name.removesuffix("s")} & {*siblings} - {name}
    if 0 < len(elsewhere) <= 3 and not plurals:
        return f"{path}: unknown key here; it belongs at `{'` or `'.join(sorted(elsewhere))}`"
    lists = len(siblings) <= 8 or section.endswith(".params")
    known_here = f" (known here: {', '.join(siblings)})" if lists else ""
    if guess := closest(name, siblings):
        guess = f"{section}.{guess}" if section else guess
    else:
        leaves = {path.rpartition(".")[2]: path for path in reversed(known)}
        guess = leaves.get(closest(name, leaves) or "")
    return f"{path}: unknown key; {hint(guess, f'remove it{known_here}')}"


def _as_object(path: str, value: object, keys: Mapping[str, Key]) -> str:
    """Returns advice for a section that has the value of its switch or device."""
    for name, kind in (("enabled", bool), ("device", str)):
        if f"{path}.{name}" in keys and isinstance(value, kind):
            return f'; write {{"{name}": {as_text(value)}}}'
    return ""
