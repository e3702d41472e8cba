"""Every key of the JSON: its kind, DeepSpeed's default, and what zerojax does with it.

The loader, the schema and the frozen config all read this one table. To teach zerojax a key,
change its row.
"""

from functools import cache

from zerojax.config.row import Key as Key
from zerojax.config.rows_numbers import batch, bf16, fp16, optimizer_and_scheduler
from zerojax.config.rows_offload import offload
from zerojax.config.rows_other import compiler, data, gradients, model, parallel, storage
from zerojax.config.rows_reports import reports
from zerojax.config.rows_zero import zero


def _table() -> dict[str, Key]:
    numbers = [*batch(), *bf16(), *fp16(), *optimizer_and_scheduler()]
    others = [*model(), *parallel(), *gradients(), *storage(), *data(), *compiler()]
    rows = [*numbers, *zero(), *offload(), *reports(), *others]
    table = {key.path: key for key in rows}
    assert len(table) == len(rows), "a key stands in the table twice"
    return table


KEYS: dict[str, Key] = _table()

# Sections that may be null, which means the same as leaving them out.
NULLABLE = frozenset({"zero_optimization.offload_param", "zero_optimization.offload_optimizer"})

# Which row speaks for a field of `ZeroConfig`.
BY_FIELD: dict[str, Key] = {key.field: key for key in KEYS.values() if key.field}


@cache
def sections() -> dict[str, list[str]]:
    """Each section's path ("" is the top) and the names in it, sections among them."""
    found: dict[str, list[str]] = {"": []}
    for path in KEYS:
        names = path.split(".")
        for depth, name in enumerate(names):
            parent = ".".join(names[:depth])
            siblings = found.setdefault(parent, [])
            if name not in siblings:
                siblings.append(name)
    return found
