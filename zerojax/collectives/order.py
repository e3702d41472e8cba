"""The order of collectives: barriers, and the window of gathers outside loops.

XLA may gather all parameters of an unrolled model at the beginning of the program, since no gather
depends on other work; then all of them are unsharded in memory at the same time. So each gather
waits for a product with parameters that were used some time before.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from zerojax.collectives.shard import ReducedGradient, Shard
from zerojax.devices.mesh import axis_size, batch_axes, batch_devices, sequence_size
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import SpecEntry
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation, Value


def hold_until(
    values: Sequence[Shard | jax.Array],
    done: Sequence[ReducedGradient],
    constrain: Callable[..., jax.Array],
) -> list[Shard | jax.Array]:
    """Returns ``values``, some of which depend on the gradients ``done``.

    A sharded parameter waits for a gradient of the same shape and spec, which costs no
    communication. The first sharded parameter waits for all other gradients; if there is no such
    parameter, the last floating array, which is a cotangent, does. Those waits cost an all-reduce
    of one bit.
    """
    remaining = list(done)
    waits: list[jax.Array | None] = [None] * len(values)
    for i, v in enumerate(values):
        twin = next((g for g in remaining if isinstance(v, Shard) and _alike(v, g)), None)
        if twin is not None:
            remaining = [g for g in remaining if g is not twin]
            # Elements of equal shards lie on the same devices, so that each waits for its own.
            waits[i] = impossible(twin.value)
    shards = [i for i, v in enumerate(values) if isinstance(v, Shard)]
    floats = [i for i, v in enumerate(values) if i not in shards and _is_float(v)]
    target = shards[0] if shards else floats[-1] if floats else None
    if target is not None:
        for g in remaining:
            # Of a replicated gradient one element is on every device; of a sharded one, XLA
            # all-reduces a bit.
            bit = jnp.any(impossible(g.value)) if any(g.spec) else impossible(_element(g.value))
            earlier = waits[target]
            waits[target] = bit if earlier is None else earlier | bit
    return [
        v if wait is None else _held(v, wait, constrain)
        for v, wait in zip(values, waits, strict=True)
    ]


def gathers_first(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether an iteration of a loop gathers the next layer before it reduces the gradients
    of the last one: on A100s and older GPUs."""
    # Llama 7B, scanned, 1 row a device: with the reductions first 8 A100s wait for 45% of the
    # collectives' time and take 671 ms, with the gathers first 2% and 600 ms. H100s hide kept
    # products better with the reductions first: a 13B takes 301 ms for 360. So do L4s.
    known = not isinstance(mesh, AbstractMesh)
    return known and float(getattr(mesh.devices.flat[0], "compute_capability", 9)) < 8.9


def hold_largest(values: Sequence[jax.Array], done: jax.Array) -> list[jax.Array]:
    """Returns ``values``, with the largest floating array dependent on ``done``, an unsharded
    array."""
    sizes = [v.size if _is_float(v) else 0 for v in values]
    at = sizes.index(max(sizes, default=0)) if any(sizes) else None
    wait = impossible(_element(done))
    return [_choose(wait, v) if i == at else v for i, v in enumerate(values)]


def takes_turns(eqn: Equation, rows: RowDimensions, mesh: Mesh) -> bool:
    """Returns whether an equation is a rematerialised block of the backward pass that can wait for
    partial sums: some of its operands have rows first, equally many on each device."""
    is_block = jaxprs.runs_backward(eqn) and jaxprs.param(eqn, "prevent_cse")
    return is_block and batch_devices(mesh) == mesh.size and bool(_with_rows(eqn, rows, mesh))


def _with_rows(eqn: Equation, rows: RowDimensions, mesh: Mesh) -> list[int]:
    shapes = [v.aval.shape if _is_float(v.aval) and 0 in rows.dims(v) else () for v in eqn.invars]
    return [i for i, shape in enumerate(shapes) if shape and shape[0] % mesh.size == 0]


def hold_rows(
    eqn: Equation,
    values: Sequence[Value],
    sums: Sequence[jax.Array],
    rows: RowDimensions,
    mesh: Mesh,
) -> list[Value]:
    """Returns the operands of a block, see :func:`takes_turns`, with the rows of the last one, a
    cotangent, dependent on their device's part of partial sums [devices, ...]: nothing is sent."""
    at, own = _with_rows(eqn, rows, mesh)[-1], jnp.zeros(mesh.size, bool)
    for each in sums:
        own |= impossible(each[(slice(None), *(0,) * (each.ndim - 1))])
    held = _choose_parts(own, values[at], 0, batch_axes(mesh), mesh)
    return [held if i == at else x for i, x in enumerate(values)]


def _held(
    v: Shard | jax.Array, wait: jax.Array, constrain: Callable[..., jax.Array]
) -> Shard | jax.Array:
    if isinstance(v, Shard):
        return v.with_value(constrain(_choose(wait, v.value), v.spec))
    return _choose(wait, v)


def _choose(wait: jax.Array, x: jax.Array) -> jax.Array:
    # A select leaves the bits of x as they are; a sum with zero would turn -0 into 0.
    return jnp.where(wait, jnp.zeros_like(x), x)


def _choose_parts(
    waits: jax.Array, x: jax.Array, at: int, axes: SpecEntry, mesh: Mesh
) -> jax.Array:
    """Returns ``x``, whose dimension ``at`` is sharded over ``axes``, each device's part dependent
    on its element of ``waits``."""
    n, size = mesh.size, x.shape[at]
    wait = lax.broadcast_in_dim(waits, (n, size // n), (0,)).reshape(size)
    wait = lax.with_sharding_constraint(wait, layout.sharding(mesh, (axes,)))
    return _choose(lax.broadcast_in_dim(wait, x.shape, (at,)), x)


def _is_float(x: Any) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _alike(v: Shard, g: ReducedGradient) -> bool:
    return (v.value.shape, v.spec) == (g.value.shape, g.spec)


def _element(x: jax.Array) -> jax.Array:
    return x[(0,) * x.ndim]


def impossible(x: jax.Array) -> jax.Array:
    """Returns False for each element, which XLA cannot prove."""
    # As an integer, NaN is a number like any other: masked, none exceeds the mask.
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    x = x.astype(unsigned) if jaxprs.bits(x.dtype) < 8 else x
    magnitude = jnp.array(jnp.iinfo(unsigned).max >> 1, unsigned)
    # XLA removes barriers before it schedules, but keeps this dependence: with barriers in its
    # place 64 H100s gather all of 4 unrolled layers of 4096 x 16384 at once, 1,074 MB for 537.
    return (lax.bitcast_convert_type(x, unsigned) & magnitude) > magnitude


AHEAD = 100_000_000
"""The fewest elements of parameters between a use and the gathers that wait for it: half a layer of
a 7B model, twice DeepSpeed's default of ``stage3_prefetch_bucket_size``. With fewer elements, the
products are too short to hide the gathers."""

MATRICES = 3
"""The number of a layer's largest matrices between a use and the gathers that wait for it, if they
have more than ``AHEAD`` elements: about a layer, as a loop over layers gathers ahead. Of 8 layers
of a 70B on 64 H100s, 2 rows a device, 51% of the gathers' time is hidden with fewer elements than
one matrix has, 90% with three matrices, at the same peak of memory."""


class _Use(NamedTuple):
    """The number of elements of the parameters used, and the equation's result, rows first."""

    elements: int
    result: jax.Array


class Window:
    """The uses of parameters in a program, in order.

    Args:
      mesh: The devices.
      axis: The axis over which parameters, the rows of a batch, and their tokens are sharded; it
        spans all devices of the mesh.
      ahead: The fewest elements of parameters between a use and the gathers that wait for it.
    """

    def __init__(self, mesh: Mesh, axis: str, ahead: int) -> None:
        self._mesh, self._axis, self._ahead = mesh, axis, ahead
        self._parts = batch_devices(mesh), sequence_size(mesh)
        self._uses: list[_Use] = []
        self._used: dict[int, Shard] = {}
        self._of_size = collections.Counter[int]()  # elements -> number of parameters used

    @classmethod
    def of(cls, mesh: Mesh, axis: str, ahead: int = AHEAD) -> Window | None:
        """Returns a window; None if other axes shard the rows or the computed arrays."""
        # With a further axis, the devices of one shard have different rows, or parts of rows, to
        # wait for.
        return cls(mesh, axis, ahead) if axis_size(mesh, axis) == mesh.size else None

    def used(
        self, shards: Sequence[Shard], results: Sequence[object], rows: Sequence[Sequence[int]]
    ) -> None:
        """Records that an equation has used unsharded parameters, its results, and the dimensions
        along which each has rows."""
        if not shards or len(results) != 1:
            return
        (result,) = results
        if not isinstance(result, jax.Array) or not jnp.issubdtype(result.dtype, jnp.floating):
            return
        # [rows, ...], or [rows, tokens, ...] if devices share the tokens of a row.
        if result.ndim <= (2 if self._parts[1] > 1 else 1) or not result.size:
            return
        if 0 in rows[0] or result.shape[0] % self._parts[0]:
            self._uses.append(_Use(sum(x.value.size for x in shards), result))
            new = {id(x): x for x in shards if id(x) not in self._used}
            self._used |= new
            self._of_size.update(x.value.size for x in new.values())

    def _elements(self) -> int:
        """Returns the number of elements between a use and the gathers that wait for it."""
        # Layers have matrices of one size; a table and a head are two at most, and far larger.
        of_layers = [size for size, n in self._of_size.items() if n > 2]
        return max(self._ahead, MATRICES * max(of_layers, default=0))

    def after(self, shard: Shard) -> jax.Array:
        """Returns a shard's array that depends on the latest use at least ``ahead`` elements back,
        and three of the layers' largest matrices.

        Each device waits for an element of its own rows, so that the wait sends nothing. Rows that
        the devices do not divide are on all of them.
        """
        remaining, result = self._elements(), None
        for use in reversed(self._uses):
            remaining -= use.elements
            if remaining < 0:
                result = use.result
                break
        dims = layout.dimensions(shard.spec, self._axis)
        if result is None or len(dims) != 1 or shard.spec[dims[0]] != self._axis:
            return shard.value
        # Device d holds part d of this dimension, and waits for an element of part d of the rows.
        if shard.value.shape[dims[0]] % self._mesh.size:
            return shard.value
        first = lax.optimization_barrier(self._first(result))
        delayed = _choose_parts(impossible(first), shard.value, dims[0], self._axis, self._mesh)
        return lax.with_sharding_constraint(delayed, layout.sharding(self._mesh, shard.spec))

    def _first(self, result: jax.Array) -> jax.Array:
        """Returns one element from each device of an array sharded by rows, or by rows and
        tokens; a single one if devices do not divide them."""
        rows, shared = self._parts
        if result.shape[0] % rows or (shared > 1 and result.shape[1] % shared):
            return jnp.broadcast_to(result[(0,) * result.ndim], (rows * shared,))
        if shared == 1:
            return result[(slice(None), *(0,) * (result.ndim - 1))].reshape(rows, -1)[:, 0]
        tokens = result[(slice(None), slice(None), *(0,) * (result.ndim - 2))]
        return tokens.reshape(rows, tokens.shape[0] // rows, shared, -1)[:, 0, :, 0].reshape(-1)
