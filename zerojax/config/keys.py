"""Every key of the JSON: its kind, DeepSpeed's default, and its treatment by zerojax.

The loader, `explain` and `ZeroConfig` all read this one table. To support a new key, add a field to
`settings.Settings`.
"""

from collections.abc import Iterator
from typing import Any

from zerojax.config.named_types import NAMED_TYPES, type_keys
from zerojax.config.row import ZERO, Key
from zerojax.config.sections import OLD_SWITCHES as OLD_SWITCHES
from zerojax.config.settings import BY_FIELD as BY_FIELD
from zerojax.config.settings import SECTIONS, XLA
from zerojax.config.unsupported import unsupported


def _rows() -> Iterator[Key]:
    yield from BY_FIELD.values()
    for place in SECTIONS.values():
        yield from place.cls.keys(place.path, place.why)
    yield from XLA.values()
    for name in NAMED_TYPES:
        yield from type_keys(name).values()
    yield from unsupported()


_ROWS = (*_rows(),)

KEYS: dict[str, Key] = {key.path: key for key in _ROWS}
"""Every key, by its dotted path."""

assert len(KEYS) == len(_ROWS), "a key stands in the tables twice"

_STAGE_3 = f"{ZERO}.stage3_"
ALIASES = {
    "bfloat16": "bf16",
    f"{_STAGE_3}gather_fp16_weights_on_model_save": f"{_STAGE_3}gather_16bit_weights_on_model_save",
} | {path.replace("stage3_", ""): path for path in KEYS if path.startswith(_STAGE_3)}
"""Current names by old names, as dotted paths; DeepSpeed accepts keys of stage 3 without prefix."""


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
            yield f"{old}: means the same as `{new}`; remove one of them"
            del parent[old_name]
        else:
            parent[new_name] = parent.pop(old_name)
