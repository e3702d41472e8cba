"""Parameters that are gathered once a step and kept until its end.

At stages 1 and 2 these are all parameters; at stage 3 small arrays, and those for which
``stage3_max_live_parameters`` leaves room. The plan selects them (:func:`by_plan`), the step's
trace determines their form (:func:`decide_kept`), and :func:`gather` gathers them.

Small arrays (the scale of a norm, a bias, see :func:`zerojax.plan.rule.is_small`) are gathered
together, by one all-gather for all of a dtype: a collective has a fixed cost regardless of its
size. They are concatenated in one matrix with a row per device, gathered, and split again. Between
steps they stay sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from zerojax.collectives import decisions
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.prefetch import gathered_dtype
from zerojax.collectives.shard import MovedStack, Shard
from zerojax.collectives.uses import Reader, Uses, readers
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import is_small
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Jaxpr


class KeptGather(NamedTuple):
    """The way in which a parameter that is kept is gathered.

    Attributes:
      together: The field of the state whose small arrays are gathered with it, by one all-gather;
        None for a large array.
      dtype: The narrower dtype to which the step rounds it before each use, and in which it is
        gathered; None for its dtype. flax casts a module's float32 parameters to its ``dtype``
        where they are used: with the cast after the gather, the gather would send and hold float32.
      by_loop: Whether the first loop over the stack of layers gathers it, one layer ahead, and
        stacks what it has gathered, see :mod:`zerojax.collectives.stacks`.
      first: The dimension of a stack of layers that comes first once it is gathered, if only loops
        read the stack, see :class:`zerojax.collectives.shard.MovedStack`; None for an unchanged
        order.
    """

    together: str | None = None
    dtype: np.dtype | None = None
    by_loop: bool = False
    first: int | None = None


def by_plan(
    shards: Sequence[object], gatherer: Gatherer, live: Collection[int] = (), field: str = "params"
) -> list[KeptGather | None]:
    """Returns, for each array, the form in which it is gathered, as far as the plan determines it;
    None for an array that is gathered where it is used, or is not sharded.

    Args:
      shards: Arrays of one field of the state.
      gatherer: Gathers parameters.
      live: The positions of the arrays that stay gathered at stage 3.
      field: The field's name.
    """

    def kept(i: int, x: object) -> KeptGather | None:
        if not isinstance(x, Shard) or x.gathering.host:
            return None
        if is_small(x.value.shape, x.spec, gatherer.axis, gatherer.thresholds.small):
            return KeptGather(together=field)
        return KeptGather() if gatherer.keep or i in live else None

    return [kept(i, x) for i, x in enumerate(shards)]


def decide_kept(
    closed: AnyJaxpr,
    args: Sequence[Any],
    kept: Sequence[KeptGather | None],
    gatherer: Gatherer,
    rows: RowDimensions,
    *,
    fill: bool,
) -> list[KeptGather | None]:
    """Returns, for each argument of a step, the form in which it is gathered if it is kept, as the
    step's trace determines it.

    Args:
      closed: The step.
      args: Its arguments, some of them a :class:`Shard`.
      kept: The result of :func:`by_plan` for each argument.
      gatherer: Gathers parameters.
      rows: The dimensions along which rows of the batch lie.
      fill: Whether loops may gather stacks that are kept: if the step runs once, and loops gather
        ahead.
    """
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    return [
        None if how is None else _decided(jaxpr, v, x, how, gatherer, rows, fill)
        for v, x, how in zip(jaxpr.invars, args, kept, strict=True)
    ]


def _decided(
    jaxpr: Jaxpr,
    v: Atom,
    x: Shard,
    how: KeptGather,
    gatherer: Gatherer,
    rows: RowDimensions,
    fill: bool,
) -> KeptGather | None:
    """Returns the form in which an array is gathered; None if the step needs only its shard."""
    dtypes = Uses(gatherer, rows).dtypes(jaxpr, v, x.spec)
    if not dtypes:
        return None
    if how.together is not None:
        return how
    dtype = next(iter(dtypes)) if len(dtypes) == 1 and v.aval.dtype not in dtypes else None
    dims = layout.dimensions(x.spec, gatherer.axis)
    # A stack that is sharded along its layers cannot be gathered layer by layer.
    if x.spec[0] is not None or len(dims) != 1:
        return KeptGather(dtype=dtype)
    loops = list(readers(jaxpr, v))
    if fill and dtype is None and _fills(x, loops, Uses(gatherer, rows, surely=True)):
        return KeptGather(by_loop=True)
    is_moved = x.value.ndim > 2 and None not in loops
    return KeptGather(dtype=dtype, first=dims[0] if is_moved else None)


def _fills(x: Shard, loops: Sequence[Reader | None], uses: Uses) -> bool:
    """Returns whether the first of the loops over a stack gathers it one layer ahead, in the dtype
    of the stack."""
    direct = [loop for loop in loops if loop is not None and not loop.cast]
    if len(direct) < max(2, len(loops)):
        return False
    dtype = gathered_dtype(direct[0].loop, direct[0].at, x, uses)
    return dtype is not None and dtype == x.value.dtype  # to numpy None is float64


def gather(
    args: Sequence[Any],
    kept: Sequence[KeptGather | None],
    gatherer: Gatherer,
    closed: AnyJaxpr | None = None,
) -> list[Any]:
    """Returns ``args``, with unsharded copies of the arrays that are kept.

    Args:
      args: Arrays, some of them a :class:`Shard`.
      kept: The forms in which they are gathered, see :func:`decide_kept`.
      gatherer: Gathers parameters.
      closed: The step that takes them, for the ledger.
    """
    gathered, ledger = list(args), gatherer.ledger

    def used(*positions: int) -> contextlib.AbstractContextManager[None]:
        if closed is None:
            return contextlib.nullcontext()
        given = jaxprs.open_jaxpr(closed)[0].invars
        return ledger.used_in(closed, *(given[i] for i in positions))

    for i, (x, how) in enumerate(zip(args, kept, strict=True)):
        if how is not None and how.together is None:
            with used(i):
                gathered[i] = _gathered(x, how, gatherer)
    fields = [None if how is None else how.together for how in kept]
    for field in dict.fromkeys(field for field in fields if field is not None):
        small = [i for i, other in enumerate(fields) if other == field]
        with (
            ledger.place(decisions.ENTRY, "small arrays are gathered together"),
            used(*small),
        ):
            copies = gather_together(
                [args[i] for i in small], gatherer.mesh, gatherer.constrain, ledger
            )
        for i, copy in zip(small, copies, strict=True):
            gathered[i] = args[i].with_copy(copy)
    return gathered


def _gathered(x: Shard, how: KeptGather, gatherer: Gatherer) -> Shard:
    """Returns a large array with its unsharded copy."""
    if how.by_loop:
        return x.with_gathering(by_loop=True)
    order = list(range(x.value.ndim))
    if how.first is not None:
        order.insert(0, order.pop(how.first))
    value = x.value if how.dtype is None else x.value.astype(how.dtype)
    value = value if how.first is None else lax.transpose(value, order)
    reason = f"{'' if how.dtype is None else 'cast, '}gathered once a step and kept"
    reason += "" if how.first is None else ", read by loops"
    with gatherer.ledger.place(decisions.ENTRY, reason):
        spec = layout.with_leaves(tuple(x.spec[i] for i in order), x.spec)
        copy = gatherer.all_gather(value, spec, quantized=x.gathering.quantized)
    if how.first is None:
        return x.with_copy(copy)
    return x.with_copy(jnp.moveaxis(copy, 0, how.first), MovedStack(copy, how.first))


def gather_together(
    shards: Sequence[Shard],
    mesh: Mesh,
    constrain: Callable[[jax.Array, Spec], jax.Array],
    ledger: Ledger | None = None,
) -> list[jax.Array]:
    """Gathers shards, by one all-gather for all shards of a dtype and axis.

    Args:
      shards: Shards of any shapes and dtypes, each small by :func:`zerojax.plan.rule.is_small`.
      mesh: The devices.
      constrain: Constrains an array to a spec.
      ledger: Records the gathers, if given.
    """
    ledger = Ledger(mesh) if ledger is None else ledger
    arrays = [shard.value for shard in shards]
    kinds = [(shard.value.dtype, next(filter(None, shard.spec))) for shard in shards]
    for kind in dict.fromkeys(kinds):
        chosen, (_, axis) = [i for i, each in enumerate(kinds) if each == kind], kind
        devices = layout.parts(axis, mesh)
        dims = [shards[i].spec.index(axis) for i in chosen]
        # The shards are constrained to their specs first, else XLA may move a cast past the gather.
        pinned = [constrain(arrays[i], shards[i].spec) for i in chosen]
        rows = [_to_rows(x, dim, devices) for x, dim in zip(pinned, dims, strict=True)]
        matrix = constrain(jnp.concatenate(rows, axis=1), (axis, None))
        with ledger.of(*(shards[i].spec for i in chosen)):
            ledger.gathers(matrix, (axis, None), (None, None))
        matrix = constrain(matrix, (None, None))
        start = 0
        for i, row, dim in zip(chosen, rows, dims, strict=True):
            block = lax.slice_in_dim(matrix, start, start + row.shape[1], axis=1)
            # Without a barrier XLA's layout differs from that of a parameter gathered separately.
            arrays[i] = lax.optimization_barrier(_from_rows(block, arrays[i].shape, dim))
            start += row.shape[1]
    return arrays


def _to_rows(x: jax.Array, dim: int, devices: int) -> jax.Array:
    return jnp.moveaxis(x, dim, 0).reshape(devices, -1)


def _from_rows(rows: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    moved = shape[dim], *shape[:dim], *shape[dim + 1 :]
    return jnp.moveaxis(rows.reshape(moved), 0, dim)
