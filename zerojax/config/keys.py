"""Every key of the JSON: its kind, DeepSpeed's default, and its treatment by zerojax.

The loader, `explain` and `ZeroConfig` all read this one table. To support a new key, add a field to
`settings.Settings`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from zerojax.config.named import NAMED
from zerojax.config.row import OBJECT, TEXT, ZERO, Key
from zerojax.config.sections import OFFLOAD
from zerojax.config.sections import OLD_SWITCHES as OLD_SWITCHES
from zerojax.config.settings import BY_FIELD as BY_FIELD
from zerojax.config.settings import SECTIONS, XLA
from zerojax.config.unsupported import unsupported


def _rows() -> Iterator[Key]:
    yield from BY_FIELD.values()
    for place in SECTIONS.values():
        yield from place.cls.keys(place.path, place.why)
    yield from XLA.values()
    for name in NAMED:
        yield Key(f"{name}.type", TEXT, None, "for zero.optimizer()", auto=None)
        yield Key(f"{name}.params", OBJECT, {}, auto=None)
    yield from unsupported()


_ROWS = (*_rows(),)

KEYS: dict[str, Key] = {key.path: key for key in _ROWS}
"""Every key, by its dotted path."""

assert len(KEYS) == len(_ROWS), "a key stands in the tables twice"

NULLABLE = frozenset(f"{ZERO}.{section}" for section in OFFLOAD)
"""Sections that may be null, which is equivalent to omitting them."""

_STAGE_3 = f"{ZERO}.stage3_"
ALIASES = {
    "bfloat16": "bf16",
    f"{_STAGE_3}gather_fp16_weights_on_model_save": f"{_STAGE_3}gather_16bit_weights_on_model_save",
} | {path.replace("stage3_", ""): path for path in KEYS if path.startswith(_STAGE_3)}
"""Current names by old names, as dotted paths; DeepSpeed accepts keys of stage 3 without prefix."""


@cache
def sections() -> dict[str, list[str]]:
    """Returns the names in each section, nested sections included, by path; "" is the top level."""
    names_by_section: dict[str, list[str]] = {"": []}
    for path in KEYS:
        names = path.split(".")
        for depth, name in enumerate(names):
            parent = ".".join(names[:depth])
            siblings = names_by_section.setdefault(parent, [])
            if name not in siblings:
                siblings.append(name)
    return names_by_section


def renamed(path: str) -> str:
    """Returns the current name of a key.

    Example:
      >>> renamed("bfloat16.enabled")
      'bf16.enabled'
    """
    for old, new in ALIASES.items():
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def rename(raw: dict[str, Any]) -> Iterator[str]:
    """Gives every key its current name, in place; yields one problem for each key given twice.

    `"zero_optimization": true` is read as stage 1, `false` as stage 0.

    Args:
      raw: A config in plain dicts.

    Example:
      >>> raw = {"zero_optimization": True, "bfloat16": {}}
      >>> list(rename(raw))
      []
      >>> raw
      {'zero_optimization': {'stage': 1}, 'bf16': {}}
    """
    if isinstance(switch := raw.get(ZERO), bool):
        raw[ZERO] = {"stage": int(switch)}
    for old, new in ALIASES.items():
        section, _, old_name = old.rpartition(".")
        parent = raw.get(section) if section else raw
        if not isinstance(parent, dict) or old_name not in parent:
            continue
        new_name = new.rpartition(".")[2]
        if new_name in parent:
            yield f"{old}: means the same as `{new}`; keep one of them"
            del parent[old_name]
        else:
            parent[new_name] = parent.pop(old_name)
