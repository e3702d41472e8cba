"""The use of shards by equations (:func:`use_of`), the dtypes in which a program needs a parameter
unsharded (:class:`Uses`), and the loops that take one layer by layer (:func:`readers`)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import lookups, propagate, sharded_products, target_specs
from zerojax.collectives.carried_sums import wider
from zerojax.collectives.gathering import Gatherer
from zerojax.collectives.narrow import widens_integers
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import BRANCHES, CAST, ELEMENTWISE, REDUCTIONS
from zerojax.graph.regions import regions
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import is_small
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.jaxprs import ScanParts
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr

_NOT_SURE = BRANCHES | {"concatenate"}
_Dtypes = frozenset[np.dtype]
_NONE: _Dtypes = frozenset()

# From the position of a result and its spec to the dtypes in which its uses need it unsharded.
_Beyond = Callable[[int, Spec], _Dtypes]


class Kind(enum.Enum):
    """Kinds of uses of the shards among an equation's operands.

    Attributes:
      ON_SHARDS: Each device computes its shard of the result.
      REDUCED: Each device reduces its shards, and XLA combines the results.
      UNCHANGED: The results are the operands, and stay as they are.
      UNSHARDED: The equation needs them unsharded, unless rows or products of them are sent.
    """

    ON_SHARDS = enum.auto()
    REDUCED = enum.auto()
    UNCHANGED = enum.auto()
    UNSHARDED = enum.auto()


class Use(NamedTuple):
    """The use of shards by one equation.

    Attributes:
      kind: What the equation does with them.
      spec: The spec of its result, if that is a shard.
      sends: The lookup whose rows, or the product whose activations, are sent in place of a shard
        that the equation needs unsharded.
    """

    kind: Kind
    spec: Spec = ()
    sends: lookups.TableLookup | sharded_products.Product | None = None


def use_of(
    eqn: Equation, specs: Sequence[Spec | None], mesh: Mesh, axis: str, *, mixes: bool = True
) -> Use:
    """Returns how an equation without programs inside uses shards.

    Args:
      eqn: The equation.
      specs: The specs of its operands, of which at least one is a shard; None for an array that is
        unsharded, or not a parameter.
      mesh: The devices.
      axis: The axis over which ZeRO shards.
      mixes: Whether shards and other arrays are combined element by element on shards.
    """
    name, first = eqn.primitive.name, specs[0]
    pairs = zip(eqn.invars, specs, strict=True)
    shards = {(spec, v.aval.shape) for v, spec in pairs if spec is not None}
    spec, _ = next(iter(shards))
    if name in ELEMENTWISE and mixes and shards == {(spec, eqn.outvars[0].aval.shape)}:
        return Use(Kind.ON_SHARDS, spec)  # not if a bias is broadcast against activations
    if name == "concatenate" and propagate.side_by_side(eqn, specs):
        return Use(Kind.ON_SHARDS, spec)
    is_dot_product = mixes and propagate.adds_up(eqn) and len({spec for spec, _ in shards}) == 1
    if name in REDUCTIONS or is_dot_product:
        return Use(Kind.REDUCED)
    if first is not None and (moved := propagate.forward(eqn, first, mesh)):
        return Use(Kind.ON_SHARDS, moved)
    if eqn.primitive is prims.sharding_constraint_p:
        # flax unboxes a parameter with the user's spec
        is_unsharded = target_specs.spec_of(eqn) == layout.without(spec, axis)
        return Use(Kind.UNCHANGED if is_unsharded else Kind.UNSHARDED)
    return Use(Kind.UNCHANGED if name == "optimization_barrier" else Kind.UNSHARDED)


class Uses:
    """The dtypes in which jaxprs need a parameter unsharded when
    :class:`zerojax.collectives.insert.Inserter` runs them.

    Args:
      gatherer: Gathers parameters.
      rows: The dimensions along which rows of the batch lie.
      surely: Leaves out uses that may not gather a parameter that was not gathered in advance:
        branches, concatenations, lookups of rows, products in which a weight stays sharded, and
        loops that take entries of the parameter.
      varies: For the uses of a loop's constant, by variable whether the value differs between
        iterations. One layer of the constant an iteration is then left out, but not a value
        computed from all of it, which each iteration would gather.
      runs: The number of iterations of that loop; None if unknown.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        rows: RowDimensions,
        *,
        surely: bool = False,
        varies: Mapping[Atom, bool] | None = None,
        runs: int | None = None,
    ) -> None:
        self._gatherer, self._rows, self._surely, self._varies = gatherer, rows, surely, varies
        self._runs = runs
        self._mesh, self._axis = gatherer.mesh, gatherer.axis

    def dtypes(self, jaxpr: Jaxpr, v: Atom, spec: Spec) -> frozenset[np.dtype]:
        """Returns the dtypes in which an open jaxpr needs its argument ``v`` unsharded: the dtype
        of ``v``, or dtypes to which the jaxpr rounds it."""
        return self._dtypes(jaxpr, v, spec, lambda at, spec: _NONE)

    def _dtypes(self, jaxpr: Jaxpr, v: Atom, spec: Spec, beyond: _Beyond) -> _Dtypes:
        """Returns the dtypes in which a variable, its casts and its other layouts are needed
        unsharded.

        Args:
          jaxpr: an open jaxpr.
          beyond: the dtypes in which the jaxpr's results are needed unsharded.
        """
        graph = graph_of(jaxpr)
        by_equations = [self._use(jaxpr, *use, spec, beyond) for use in graph.users(v)]
        return _NONE.union(*by_equations, *(beyond(at, spec) for at in graph.returned(v)))

    def _use(self, jaxpr: Jaxpr, eqn: Equation, i: int, spec: Spec, beyond: _Beyond) -> _Dtypes:
        """Returns the dtypes in which an equation needs its operand ``i`` unsharded, by itself or
        because a use of its results needs them unsharded."""
        v, own_dtype, own_spec = eqn.invars[i], frozenset([eqn.invars[i].aval.dtype]), spec

        def of_result(at: int, spec: Spec) -> _Dtypes:
            carried = layout.with_leaves(spec, own_spec)
            return self._dtypes(jaxpr, eqn.outvars[at], carried, beyond)

        if eqn.primitive in jaxprs.CALLS:
            (body,) = jaxprs.bodies(eqn)
            return self._dtypes(body, body.invars[i], spec, of_result)
        if (loop := jaxprs.scan_parts(eqn)) is not None:
            return self._in_loop(loop, i, spec, of_result)
        if marks.is_mark(eqn, marks.SHARD) or eqn.primitive.name == "shard_map":
            return _NONE
        if self._surely and self._is_unsure(eqn, i, spec):
            return _NONE
        if self._runs is not None and self._stays(eqn, i, spec):
            return _NONE
        if eqn.primitive is prims.cond_p and self._varies is not None:
            branches = [(region.jaxpr, region.argument(i)) for region in regions(eqn)]
            found = (self._dtypes(*each, spec, lambda *_: own_dtype) for each in branches)
            return _NONE.union(*found)
        specs = [spec if at == i else None for at in range(len(eqn.invars))]
        use = use_of(eqn, specs, self._mesh, self._axis)
        if use.kind is Kind.UNCHANGED:
            return of_result(i, spec)
        if use.kind is not Kind.ON_SHARDS:
            return _NONE if use.kind is Kind.REDUCED else own_dtype
        if propagate.follows(eqn):
            return _NONE if self._is_layer(eqn) else of_result(0, use.spec)
        if eqn.primitive.name != CAST:  # the result is gathered, but not in each iteration
            return _NONE if self._varies is None else own_dtype
        if self._varies is None and widens_integers(eqn):
            return own_dtype
        return _of_cast(v, eqn.outvars[0], of_result(0, spec))

    def _is_unsure(self, eqn: Equation, i: int, spec: Spec) -> bool:
        if eqn.primitive is prims.gather_p and i == 0:
            return lookups.spec_by_rows(eqn, spec, self._gatherer, self._rows) is not None
        return self._stays(eqn, i, spec) or eqn.primitive.name in _NOT_SURE

    def _stays(self, eqn: Equation, i: int, spec: Spec) -> bool:
        """Returns whether an equation multiplies the shards of its operand ``i``."""
        arguments = self._gatherer, self._rows, self._runs
        return sharded_products.find_product(eqn, i, spec, *arguments) is not None

    def _is_layer(self, eqn: Equation) -> bool:
        """Returns whether an equation takes one layer of a loop's constant, another one in each
        iteration."""
        if self._varies is None or eqn.primitive.name != "dynamic_slice":
            return False
        indices = jaxprs.variables(eqn.invars[1:])
        return eqn.invars[0].aval.ndim > 2 and any(self._varies.get(v) for v in indices)

    def _in_loop(self, loop: ScanParts, i: int, spec: Spec, of_result: _Beyond) -> _Dtypes:
        """Returns the dtypes in which a scan needs its operand ``i`` unsharded. A stack that is
        sharded along its layers is gathered, and so is a carried value, unless the loop carries
        its shard, see :func:`carries_shard`."""
        body, _ = jaxprs.open_jaxpr(loop.body)
        own_dtype = frozenset([body.invars[i].aval.dtype])
        is_stacked = i >= loop.first_stack
        if is_stacked and spec[0] is not None:
            return own_dtype
        if loop.consts <= i < loop.first_stack:
            pair = body.invars[i], body.outvars[i - loop.consts]
            return _NONE if carries_shard(*pair, spec, self._gatherer) else own_dtype
        if is_stacked and (self._surely or self._varies is not None):
            return _NONE

        def beyond(at: int, spec: Spec) -> _Dtypes:
            return of_result(at, (None, *spec)) if at >= loop.carry else own_dtype

        entry_spec = layout.with_leaves(spec[1:], spec) if is_stacked else spec
        return self._dtypes(body, body.invars[i], entry_spec, beyond)


def carries_shard(old: Atom, new: Atom, spec: Spec, gatherer: Gatherer) -> bool:
    """Returns whether a loop carries the shard of a sharded value: of a large value that an
    iteration changes from ``old`` to ``new``."""
    small = is_small(old.aval.shape, spec, gatherer.axis, gatherer.thresholds.small)
    return not (new is old or small or gatherer.lanes_on_axis)


def _of_cast(old: Atom, new: Atom, needed: _Dtypes) -> _Dtypes:
    """Returns the dtypes in which the operand of a cast is needed unsharded, from those of the
    result."""
    if not needed:
        return _NONE
    return frozenset([(new if wider(old, new) else old).aval.dtype])


class Reader(NamedTuple):
    """A loop that takes a stack layer by layer.

    Attributes:
      loop: The scan.
      at: The position of the stack among those that the scan reads.
      cast: Whether the stack is cast before the loop.
    """

    loop: ScanParts
    at: int
    cast: bool


def readers(jaxpr: AnyJaxpr, v: Atom, cast: bool = False) -> Iterator[Reader | None]:
    """Yields the uses that need ``v`` unsharded, in order: a loop that takes it layer by layer, or
    None for another use.

    Args:
      jaxpr: A jaxpr.
      v: One of its variables.
      cast: Whether ``v`` is the result of a cast.
    """
    jaxpr, _ = jaxprs.open_jaxpr(jaxpr)
    graph = graph_of(jaxpr)
    for use in graph.users(v):
        yield from _of_use(jaxpr, *use, cast)
    if graph.returned(v):
        yield None


def _of_use(jaxpr: Jaxpr, eqn: Equation, i: int, cast: bool) -> Iterator[Reader | None]:
    """Yields what :func:`readers` yields for operand ``i`` of one equation."""
    if (loop := jaxprs.scan_parts(eqn)) is not None:
        at = i - loop.first_stack
        yield Reader(loop, at, cast) if at >= 0 else None
    elif eqn.primitive in jaxprs.CALLS and eqn.primitive is not prims.remat_p:
        (body,) = jaxprs.bodies(eqn)
        yield from readers(body, body.invars[i], cast)
    elif eqn.primitive.name == CAST:
        yield from readers(jaxpr, eqn.outvars[0], cast=True)
    elif not _on_shards(eqn, i) and not marks.is_mark(eqn, marks.SHARD):
        yield None


def _on_shards(eqn: Equation, i: int) -> bool:
    """Returns whether an equation runs on the shard of its operand ``i``: a reduction, or an
    element-wise equation, whose result is gathered in place of the operand."""
    name = eqn.primitive.name
    is_elementwise = name in ELEMENTWISE and eqn.outvars[0].aval.shape == eqn.invars[i].aval.shape
    return is_elementwise or name in REDUCTIONS
