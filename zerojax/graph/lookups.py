"""Lookups: windows of an array at computed indices, which a gather reads and a scatter writes.

    windows[t, :] = table[indices[t, 0], :]        a gather
    table[indices[t, 0], :] += windows[t, :]       a scatter

The first dimension of the table is picked: an index names one of its entries. The second one is a
dimension of each window. The dimension ``t`` of the windows comes from the indices, whose last
dimension has the numbers of one index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerojax.graph.primitives import SCATTERS
from zerojax.xla.jaxprs import param
from zerojax.xla.types import Equation, MaybeNone


@dataclass(frozen=True, eq=False)
class Lookup:
    """A gather or a scatter. Its windows are the result of the gather, the updates of the scatter.

    Attributes:
      picked: The dimensions of the array of which a window has one entry.
      batched: The batch dimensions of the array, each with the dimension of the indices that counts
        the same entries: an index of entry ``i`` looks up a window in entry ``i`` of the array.
      columns: For each number of an index, the dimension of the array that it counts along.
      window: The dimensions of the array that windows have, each with the dimension of the windows.
      complete: Those of them along which a window is as large as the array.
      by_index: The dimensions of the windows that come from the indices, in order.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> table, indices = jnp.ones((9, 4)), jnp.arange(3)
      >>> closed = jax.make_jaxpr(lambda x, i: x.at[i].get(mode="clip"))(table, indices)
      >>> lookup = Lookup.of(closed.eqns[-1])
      >>> lookup.picked, lookup.window, lookup.by_index
      ((0,), {1: 1}, [0])
    """

    picked: Sequence[int]
    batched: Mapping[int, int]
    columns: Sequence[int]
    window: Mapping[int, int]
    complete: frozenset[int]
    by_index: Sequence[int]

    @classmethod
    def of(cls, eqn: Equation) -> Lookup | MaybeNone:
        """Returns an equation as a lookup; None for other primitives."""
        if eqn.primitive.name not in SCATTERS | {"gather"}:
            return None
        windows = (eqn.invars[2] if eqn.primitive.name in SCATTERS else eqn.outvars[0]).aval
        # JAX names these differently for a gather and for a scatter, in one order.
        within, picked, columns, batching, of_indices = param(eqn, "dimension_numbers")
        shape = eqn.invars[0].aval.shape
        kept = [d for d in range(len(shape)) if d not in (*picked, *batching)]
        window = dict(zip(kept, within, strict=True))
        complete = frozenset(d for d, at in window.items() if windows.shape[at] == shape[d])
        by_index = [d for d in range(windows.ndim) if d not in within]
        batched = dict(zip(batching, of_indices, strict=True))
        return cls(picked, batched, columns, window, complete, by_index)
