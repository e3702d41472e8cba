"""The table of keys as a pydantic model, and its complaints in our words."""

from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from zerojax.config.errors import closest, shown
from zerojax.config.families import FAMILIES
from zerojax.config.keys import KEYS, NULLABLE, sections


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
    try:
        model().model_validate(raw)
    except ValidationError as error:
        found: dict[str, str] = {}
        for item in error.errors(include_url=False, include_context=False):
            path, problem = _told(item["type"], [str(part) for part in item["loc"]], raw)
            found.setdefault(path, problem)
        return list(found.values())
    return []


def _told(error: str, loc: list[str], raw: dict[str, Any]) -> tuple[str, str]:
    if error == "extra_forbidden":
        path = ".".join(loc)
        return path, unknown_key(path)
    # pydantic points below the key where the kind is a union or a tuple.
    while ".".join(loc) not in KEYS and ".".join(loc) not in sections():
        loc = loc[:-1]
    path = ".".join(loc)
    says = KEYS[path].kind.says if path in KEYS else "an object"
    value: Any = raw
    for name in loc:
        value = value[name]
    return path, f"{path}: expected {says}, got {shown(value)}"


def unknown_key(path: str) -> str:
    """Says of a key that nobody knows what may be meant, or where it belongs."""
    section, _, name = path.rpartition(".")
    if name == "max_grad_norm":
        return f"{path}: unknown key; use `gradient_clipping` at the top level"
    siblings = sections()[section]
    elsewhere = [p for p in [*KEYS, *sections()] if p.rpartition(".")[2] == name]
    elsewhere += [
        f"{kind}.params.{name}"
        for kind, families in FAMILIES.items()
        if any(name in family.params for family in families.values())
    ]
    if elsewhere and len(elsewhere) <= 3:
        return f"{path}: unknown key here; it belongs at `{'` or `'.join(elsewhere)}`"
    if guess := closest(name, siblings):
        full = f"{section}.{guess}" if section else guess
        return f"{path}: unknown key; did you mean `{full}`?"
    leaves = {p.rpartition(".")[2]: p for p in reversed(list(KEYS))}
    if guess := closest(name, leaves):
        return f"{path}: unknown key; did you mean `{leaves[guess]}`?"
    here = f" (known here: {', '.join(siblings)})" if len(siblings) <= 8 else ""
    return f"{path}: unknown key; take it out{here}"
