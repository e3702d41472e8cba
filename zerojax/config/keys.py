"""Every key of the JSON: its kind, DeepSpeed's default, and its treatment by zerojax.

The loader, `explain` and `ZeroConfig` all read this one table. To support a new key, add a field to
`settings.Settings`.
"""

from collections.abc import Iterator
from typing import Any

from zerojax.config.errors import ConfigError, as_text
from zerojax.config.kinds import FLAG
from zerojax.config.named_types import NAMED_TYPES, type_keys
from zerojax.config.row import ZERO, Key
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

SWITCHES = {
    f"{ZERO}.cpu_offload": f"{ZERO}.offload_optimizer.device",
    f"{ZERO}.cpu_offload_param": f"{ZERO}.offload_param.device",
    f"{ZERO}.cpu_offload_params": f"{ZERO}.offload_param.device",
}
"""The key for the device by DeepSpeed's deprecated flag for the device "cpu"."""


def renamed(path: str) -> str:
    """Returns the current name of a key.

    Example:
      >>> renamed("bfloat16.enabled")
      'bf16.enabled'
    """
    for old, new in (ALIASES | SWITCHES).items():
        if path == old or path.startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def rename(raw: dict[str, Any]) -> Iterator[str]:
    """Gives every key its current name, in place; yields one problem for each key given twice.

    `"zero_optimization": true` is read as stage 1, `false` as stage 0; `"cpu_offload": true` as the
    device "cpu" of `offload_optimizer`, `false` as "none".

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
    zero: dict[str, Any] = raw[ZERO] if isinstance(raw.get(ZERO), dict) else {}
    for old, new in SWITCHES.items():
        switch, section = zero.pop(old.rpartition(".")[2], None), new.split(".")[1]
        if switch is not None and zero.get(section) is None:
            zero[section] = {}
        if switch is None or not isinstance(zero[section], dict):
            continue
        existing = zero[section].get("device")
        try:
            device = switch if switch == "auto" else "cpu" if FLAG.check(switch) else "none"
        except ConfigError as error:
            yield f"{old}: {error}"
        else:
            if existing in (None, "auto"):
                zero[section]["device"] = device
            elif device not in ("auto", existing):
                given, device = as_text(switch), as_text(existing)
                yield f"{old} = {given} contradicts {new} = {device}; remove it"
