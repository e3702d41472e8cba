"""Every key of the JSON: its kind, DeepSpeed's default, and what zerojax does with it.

The loader, `explain` and `ZeroConfig` all read this one table. To teach zerojax a key, add a row to
one of the tables below.
"""

from functools import cache

from zerojax.config.keys.others import OTHERS
from zerojax.config.keys.reports import REPORTS
from zerojax.config.keys.row import Key
from zerojax.config.keys.training import TRAINING
from zerojax.config.keys.zero import OFFLOAD, SHARDING

_ROWS = (*TRAINING, *SHARDING, *OFFLOAD, *REPORTS, *OTHERS)

KEYS: dict[str, Key] = {key.path: key for key in _ROWS}
"""Every key, by its dotted path."""

assert len(KEYS) == len(_ROWS), "a key stands in the tables twice"

NULLABLE = frozenset({"zero_optimization.offload_param", "zero_optimization.offload_optimizer"})
"""Sections that may be null, which means the same as leaving them out."""

BY_FIELD: dict[str, Key] = {key.field: key for key in KEYS.values() if key.field}
"""The key of each field of `ZeroConfig` that one key sets."""


@cache
def sections() -> dict[str, list[str]]:
    """Names in each section, sections among them, by the section's path; "" is the top."""
    names_in: dict[str, list[str]] = {"": []}
    for path in KEYS:
        names = path.split(".")
        for depth, name in enumerate(names):
            parent = ".".join(names[:depth])
            siblings = names_in.setdefault(parent, [])
            if name not in siblings:
                siblings.append(name)
    return names_in
