"""Every key of the JSON: its kind, DeepSpeed's default, and its treatment by zerojax.

The loader, `explain` and `ZeroConfig` all read this one table. To support a new key, add a row to
one of the tables of this folder.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

from zerojax.config.keys.autotuning import AUTOTUNING
from zerojax.config.keys.others import OTHERS, REPORTS
from zerojax.config.keys.quantized import QUANTIZED
from zerojax.config.keys.row import ZERO, Key
from zerojax.config.keys.training import OFFLOAD, SHARDING, TRAINING
from zerojax.config.keys.training import OLD_SWITCHES as OLD_SWITCHES
from zerojax.config.keys.xla import XLA

_ROWS = (*TRAINING, *SHARDING, *QUANTIZED, *OFFLOAD, *XLA, *REPORTS, *AUTOTUNING, *OTHERS)

KEYS: dict[str, Key] = {key.path: key for key in _ROWS}
"""Every key, by its dotted path."""

assert len(KEYS) == len(_ROWS), "a key stands in the tables twice"

NULLABLE = frozenset(f"{ZERO}.{section}" for section in OLD_SWITCHES)
"""Sections that may be null, which is equivalent to omitting them."""

ALIASES = {
    "bfloat16": "bf16",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": (
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    ),
} | {
    f"{ZERO}.{name}": f"{ZERO}.stage3_{name}"
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
        "partition_stream_chunk_size",
    )
}
"""Current names by old names, as dotted paths; DeepSpeed accepts keys of stage 3 without prefix."""

BY_FIELD: dict[str, Key] = {key.field: key for key in KEYS.values() if key.field}
"""The key of each field of `ZeroConfig` that one key sets."""


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
