"""The table of keys as a pydantic model, and its complaints in our words."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from zerojax.config.errors import shown
from zerojax.config.families import FAMILIES
from zerojax.config.keys import KEYS, NULLABLE, sections
from zerojax.config.unknown import closest, hint, judged, spelled


def _model(section: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name in sections()[section]:
        path = f"{section}.{name}" if section else name
        kind = KEYS[path].kind.annotation if path in KEYS else _model(path)
        fields[name] = (kind | None if path in NULLABLE else kind, None)
    return create_model(section or "config", __config__=ConfigDict(extra="forbid"), **fields)


@cache
def model() -> type[BaseModel]:
    """The model of the whole JSON; `model().model_json_schema()` serves an editor."""
    return _model("")


def check(raw: dict[str, Any]) -> list[str]:
    """What is wrong with the shape of a config: unknown keys, wrong types.

    Args:
      raw: plain dicts with string keys, free of "auto".

    Example:
      >>> check({"zero_optimization": {"stage": 4}})
      ['zero_optimization.stage: expected 0, 1, 2 or 3, got 4']
    """
    found: dict[str, str] = {}
    unknown: dict[str, tuple[str, str]] = {}
    try:
        model().model_validate(raw)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            loc = [str(part) for part in item["loc"]]
            if item["type"] == "extra_forbidden":
                section, name = ".".join(loc[:-1]), loc[-1]
                unknown[dotted(section, name)] = section, name
            else:
                path, problem = _told(loc, raw)
                found.setdefault(path, problem)
    return [*found.values(), *judged(list(unknown), lambda path: unknown_key(*unknown[path]))]


def dotted(section: str, name: str) -> str:
    """The path of a key in a message; "" is the top."""
    return f"{section}.{spelled(name)}" if section else spelled(name)


def _told(loc: list[str], raw: dict[str, Any]) -> tuple[str, str]:
    # pydantic points below the key where the kind is a union or a tuple.
    while ".".join(loc) not in KEYS and ".".join(loc) not in sections():
        loc = loc[:-1]
    path = ".".join(loc)
    says = KEYS[path].kind.says if path in KEYS else "an object"
    value: Any = raw
    for name in loc:
        value = value[name]
    return path, f"{path}: expected {says}, got {shown(value)}"


def unknown_key(section: str, name: str) -> str:
    """Says of a key that nobody knows what may be meant, or where it belongs.

    Args:
      section: the path of what it stands in; "" is the top.
      name: of the key.

    Example:
      >>> unknown_key("", "")
      '"": a key without a name; take it out, or give it its name'
    """
    path = dotted(section, name)
    if not name.strip():
        return f"{path}: a key without a name; take it out, or give it its name"
    if name == "max_grad_norm":
        return f"{path}: unknown key; use `gradient_clipping` at the top level"
    full = f"{section}.{name}" if section else name
    if full in KEYS or full in sections():
        outer, _, inner = name.partition(".")
        return f'{path}: sections are objects; write {{"{outer}": {{"{inner}": ...}}}}'
    siblings = sections()[section]
    elsewhere = [p for p in [*KEYS, *sections()] if p.rpartition(".")[2] == name]
    elsewhere += [
        f"{kind}.params.{name}"
        for kind, families in FAMILIES.items()
        if any(name in family.params for family in families.values())
    ]
    if elsewhere and len(elsewhere) <= 3:
        return f"{path}: unknown key here; it belongs at `{'` or `'.join(elsewhere)}`"
    here = f" (known here: {', '.join(siblings)})" if len(siblings) <= 8 else ""
    return f"{path}: unknown key; {hint(name, _guess(section, name), f'take it out{here}')}"


def _guess(section: str, name: str) -> str | None:
    """The path that may be meant: in the same section, or else anywhere."""
    if guess := closest(name, sections()[section]):
        return f"{section}.{guess}" if section else guess
    leaves = {path.rpartition(".")[2]: path for path in reversed(list(KEYS))}
    return leaves.get(closest(name, leaves) or "")
