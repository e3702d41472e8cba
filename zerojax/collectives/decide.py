"""Decisions on a program, on its equations and its loops, as data, and how each is taken.

The step, a function that it calls, a branch, and one iteration of a loop are separate programs.
:class:`zerojax.collectives.insert.Decider` walks through all of them before anything is emitted.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import primitives as prims

from zerojax.collectives import deferred, gradients, prefetch, residuals, target_specs
from zerojax.collectives.carried_sums import CarriedSums
from zerojax.collectives.gathering import Gatherer, Scope, is_on_devices, is_sharded
from zerojax.collectives.gradients import Reduction, Terms
from zerojax.collectives.narrow import narrowest
from zerojax.collectives.partial_sums import RowSum
from zerojax.collectives.shard import Shard
from zerojax.collectives.sharded_products import find_product
from zerojax.collectives.uses import Use, Uses, carries_shard
from zerojax.graph.contractions import RESULT
from zerojax.graph.def_use import graph_of
from zerojax.graph.reach import dependent
from zerojax.graph.regions import regions
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.quantized import E4M3, E5M2, Format, within_params
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, MaybeNone

Formats = tuple[Format | None, ...]


@dataclass(frozen=True, eq=False)
class ProgramDecisions:
    """The decisions on one program.

    Attributes:
      wants: By variable, the spec of the shard of each gradient, and of each value of which one is
        computed. Terms that are added up before they are reduced are left out.
      reductions: By variable, the reduction of each gradient that its equation produces.
      block_sums: By gradient, the sums of several rematerialised blocks of which it is the sum, by
        result of a block, see :func:`zerojax.collectives.deferred.decide_block_sums`.
      leaving: The stacks that wait in host memory for the backward pass.
      used_unsharded: The arguments that are shards which a use other than a lookup needs unsharded.
      in_fp8: The specs of those of ``wants`` that belong to parameters whose products run in fp8,
        also of terms that are added up first.
      rounded: By ``id`` of a product in fp8, the formats of its operands.
      inside: By ``id`` of an equation that is not run as it is, the decisions on it.
    """

    wants: Mapping[Atom, Spec]
    reductions: Mapping[Atom, Reduction]
    block_sums: Mapping[Atom, Mapping[Atom, RowSum]]
    leaving: set[Atom]
    used_unsharded: frozenset[Atom]
    in_fp8: Mapping[Atom, Spec] = field(default_factory=dict)
    rounded: dict[int, Formats] = field(default_factory=dict)
    inside: dict[int, EquationDecisions] = field(default_factory=dict)

    def row_sums(self, eqn: Equation) -> dict[Atom, RowSum]:
        """Returns the sums over rows in a rematerialised block that later blocks add to."""
        results = {v: each for sums in self.block_sums.values() for v, each in sums.items()}
        found = [results[v] for v in eqn.outvars if v in results]
        return {each.eqn.outvars[0]: each for each in found}

    @functools.cached_property
    def placed(self) -> set[Atom]:
        """The gradients, the values from which they are computed, and the stacks that leave."""
        return {*self.wants, *self.leaving}


@dataclass(eq=False)
class EquationDecisions:
    """The decisions on one equation, as far as they apply to it.

    Attributes:
      eqn: The equation.
      program: The decisions on the program that contains it.
      use: Its use of shards.
      programs: The decisions on the programs inside, in order: a called program, the body of a
        scan, the branches, the condition and the body of a ``while`` loop.
      results: By result of a ``cond``, its spec if it is a shard.
      scan: The decisions on a scan.
      loop: The decisions on a ``while`` loop.
      sent: By position of a stack that a scan computes and sends to host memory, the spec of an
        entry's shard; None for residuals.
    """

    eqn: Equation
    program: ProgramDecisions
    use: Use | MaybeNone = None
    programs: list[ProgramDecisions] = field(default_factory=list)
    results: Sequence[Spec | None] = ()
    scan: LoopDecisions | MaybeNone = None
    loop: WhileDecisions | MaybeNone = None
    sent: dict[int, Spec | None] = field(default_factory=dict)

    @property
    def rounded(self) -> Formats:
        """The formats to which a product's operands are rounded, see :func:`formats_of_product`."""
        return self.program.rounded.get(id(self.eqn), ())

    @property
    def wants(self) -> list[Spec | None]:
        """By result, the spec of its shard if it is a gradient, or if one is computed from it."""
        return [self.program.wants.get(v) for v in self.eqn.outvars]

    @property
    def reductions(self) -> list[Reduction | None]:
        """By result, the reduction of a gradient that the equation produces."""
        return [self.program.reductions.get(v) for v in self.eqn.outvars]


class WhileDecisions(NamedTuple):
    """The decisions on a ``while`` loop.

    Attributes:
      updated: See :class:`LoopDecisions`.
      constants: Those of the condition and of the body, see :class:`LoopDecisions`.
    """

    updated: Mapping[int, Spec]
    constants: Sequence[set[int]]


@dataclass(frozen=True, eq=False)
class LoopDecisions:
    """The decisions on one loop. Positions count from the first operand, or result, of a kind:
    constants, carried values, stacks.

    Attributes:
      sums: The carried values that are added up on each device and reduced after the loop.
      carried: Positions of the other carried values.
      constants: Positions of the constants that are gathered before the loop.
      gathered: Positions of the stacks that are gathered before the loop: a stack that is sharded
        along its layers cannot be gathered layer by layer.
      prefetched: By position of a stack, the dtype in which its layers are gathered one iteration
        ahead.
      filled: By position of a stack, its sharded dimension, for those that the loop gathers and
        stacks for later loops.
      updated: By position of a carried value, the spec of its shard, for state that an iteration
        changes: the loop carries shards, and each iteration gathers the state that it needs.
      deferred: By position of a stack of gradients, the sum that is reduced one iteration later.
      layer: Bytes of the parameters gathered ahead, or of the gradients reduced one iteration
        later, whichever are more.
      of_layer: Whether an iteration is one layer, whose gradients are stacked.
      want: For each result of an iteration the spec of its shard if it is a gradient; None for
        others. Last, for each of ``sums.roots`` its spec if each device adds up its own shard.
    """

    sums: CarriedSums
    carried: Sequence[int]
    constants: set[int]
    gathered: set[int]
    prefetched: Mapping[int, jnp.dtype]
    filled: Mapping[int, int]
    deferred: Mapping[int, RowSum]
    updated: Mapping[int, Spec]
    layer: int
    of_layer: bool
    want: Sequence[Spec | None]

    @property
    def in_place(self) -> Mapping[Atom, Spec | None]:
        """The spec of each of ``sums.roots``; None for one that is reduced after the loop."""
        roots = self.sums.roots
        return dict(zip(roots, self.want[len(self.want) - len(roots) :], strict=True))


def decide_program(
    jaxpr: Jaxpr,
    args: Sequence[object],
    want: Sequence[Spec | None],
    gatherer: Gatherer,
    scope: Scope,
    smallest: int | None,
) -> ProgramDecisions:
    """Decides how a program runs on shards.

    Args:
      jaxpr: The program, an open jaxpr.
      args: Its arguments, some of them a :class:`zerojax.collectives.shard.Shard`.
      want: For each result the spec of its shard if it is a gradient; None for others. May be empty
        if no result is a gradient.
      gatherer: Gathers parameters and reduces gradients.
      scope: The scope in which the program runs.
      smallest: The fewest elements, on all devices together, of a block's residual that waits in
        host memory; None keeps all residuals on the devices.
    """
    mesh, graph, rows = gatherer.mesh, graph_of(jaxpr), scope.row_dims
    wants = target_specs.trace_back(jaxpr, want or [None] * len(jaxpr.outvars), mesh)

    def reduction(v: Atom) -> Reduction:
        return gradients.decide_reduction(graph.producer(v), wants[v], gatherer, rows)

    reductions = {
        v: reduction(v)
        for v in graph.in_order(wants)
        if not regions(eqn := graph.producer(v)) and not target_specs.passes(eqn, wants, mesh)
    }
    in_place = {v for v, each in reductions.items() if each.terms is Terms.NONE}
    sums = gradients.find_sums(jaxpr, wants, mesh, rows, of_layer=scope.of_layer, in_place=in_place)
    reductions |= {v: reduction(v) for v in sums.reduced}
    shards = {v: x for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, Shard)}
    uses = Uses(gatherer, rows, surely=True)
    return ProgramDecisions(
        wants={v: spec for v, spec in wants.items() if v not in sums.added},
        reductions={v: each for v, each in reductions.items() if v not in sums.added},
        block_sums={}
        if scope.host or scope.row_sums
        else deferred.decide_block_sums(jaxpr, wants, gatherer, rows),
        leaving=set() if smallest is None else residuals.find_leaving(jaxpr, smallest),
        used_unsharded=frozenset(v for v, x in shards.items() if uses.dtypes(jaxpr, v, x.spec)),
        in_fp8={v: spec for v, spec in wants.items() if gatherer.sent.in_fp8(spec)},
    )


def formats_of_product(
    eqn: Equation,
    values: Sequence[object],
    program: ProgramDecisions,
    gatherer: Gatherer,
    scope: Scope,
) -> Formats:
    """Returns the format to which each operand of a product in fp8 is rounded: e4m3, and e5m2 for
    cotangents, which differ more in size; None for a parameter. Empty for other equations.

    Args:
      eqn: The equation.
      values: Its operands, some of them a :class:`Shard`.
      program: The decisions on the program that contains it.
      gatherer: Notes the parameters that products multiply.
      scope: The scope in which it runs.
    """
    if eqn.primitive is not prims.dot_general_p:
        return ()
    if shards := [v for v in values if isinstance(v, Shard)]:
        if not any(v.in_fp8 for v in shards):
            return ()
        gatherer.multiplied.update(*(within_params(v.spec) for v in shards))
        other: Format = E5M2 if scope.computes_gradients(eqn) else E4M3
        return tuple(None if isinstance(v, Shard) else other for v in values)
    # The gradient of a product that ran in fp8, of which JAX multiplies the cotangent from the
    # left.
    of = within_params(program.in_fp8.get(eqn.outvars[0]))
    return (E5M2, E4M3) if of and of <= gatherer.multiplied else ()


def decide_loop(
    at: EquationDecisions,
    values: Sequence[object],
    updated: Mapping[int, Spec],
    gatherer: Gatherer,
    scope: Scope,
    *,
    prefetches: bool,
) -> LoopDecisions:
    """Decides how a loop runs on shards.

    Args:
      at: The decisions on the scan so far.
      values: Its operands, some of them a :class:`Shard`.
      updated: See :func:`find_updated`.
      gatherer: Gathers parameters and reduces gradients.
      scope: The scope that contains the loop.
      prefetches: Whether the loop gathers parameters one iteration ahead.
    """
    loop = jaxprs.scan_parts(at.eqn)
    want = target_specs.of_scan_body(loop, at.wants)
    (consts, _, xs), (carried_want, stacks_want) = loop.operands(values), loop.results(want)
    sums = CarriedSums(loop, carried_want, gatherer.thresholds.held)
    carried = [i for i in range(loop.carry) if i not in sums.terms]
    # A loop that carries other gradients runs over micro-batches, and each iteration gathers.
    remaining = [i for i in carried if i not in sums.stacks and i not in updated]
    gradient_specs = [spec for i in remaining if (spec := want[i]) is not None]
    over_micro_batches = any(is_sharded(spec, gatherer.axis) for spec in gradient_specs)
    gathered = {i for i, x in enumerate(xs) if isinstance(x, Shard) and x.spec[0]}
    read = [None if i in gathered else narrowest(x) for i, x in enumerate(xs)]
    has_stacks = any(stacks_want) or bool(sums.stacks)
    in_place = {v: _in_place(sums, v, loop, gatherer, scope.row_dims) for v in sums.roots}
    prefetched = prefetch.decide_prefetches(
        loop, read, gatherer, scope.row_dims, gathers=prefetches
    )
    later = (
        # At the end of its own iteration nothing hides a reduce-scatter: 8 layers of 1024 x 4096 on
        # 8 H100s take 2.73 ms a step by forecast, 2.37 with reductions one iteration later.
        deferred.decide_deferrals(loop, stacks_want, gatherer, scope.row_dims)
        if scope.defers
        else {}
    )
    (*_, stacks), (_, results) = loop.operands(at.eqn.invars), loop.results(at.eqn.outvars)
    stacked_bytes = (
        sum(stacks[i].aval.size * _itemsize(read[i], d) for i, d in prefetched.items()),
        sum(results[i].aval.size * results[i].aval.dtype.itemsize for i in later),
    )
    return LoopDecisions(
        sums=sums,
        carried=carried,
        constants=set()
        if over_micro_batches
        else find_constants(loop.body, consts, gatherer, scope.row_dims, loop.length),
        gathered=gathered,
        prefetched=prefetched,
        filled={
            i: layout.dimensions(x.spec, gatherer.axis)[0]
            for i, x in enumerate(xs)
            if i not in gathered and isinstance(x, Shard) and x.gathering.by_loop
        },
        deferred=later,
        updated=updated,
        layer=max(stacked_bytes) // loop.length,
        of_layer=has_stacks
        and not any(spec for i, spec in enumerate(carried_want) if i not in sums.stacks),
        want=[*(updated.get(i, want[i]) for i in carried), *stacks_want, *in_place.values()],
    )


def _itemsize(x: object, dtype: jnp.dtype) -> int:
    """Returns the bytes of an element of a stack that is gathered in a dtype, or as codes."""
    return 1 if isinstance(x, Shard) and x.gathering.scales is not None else dtype.itemsize


def _in_place(
    sums: CarriedSums, root: Atom, loop: jaxprs.ScanParts, gatherer: Gatherer, dims: RowDimensions
) -> Spec | None:
    """Returns the spec of a sum of which each device adds up its own shard; None for a sum that is
    reduced after the loop."""
    producer, spec = sums.producer(root), sums.spec(root, gatherer.mesh, gatherer.axis)
    if producer is None or spec is None:
        return None
    product = find_product(producer, RESULT, spec, gatherer, dims, loop.length)
    return None if product is None else spec


def trains(eqn: Equation) -> bool:
    """Returns whether a loop or a choice contains a complete backward pass."""
    # A loop that differentiation has made is a part of one backward pass.
    return not jaxprs.is_transposed(eqn) and contains(eqn, jaxprs.is_transposed)


def find_updated(eqn: Equation, values: Sequence[object], gatherer: Gatherer) -> dict[int, Spec]:
    """Returns the specs of the large shards that a loop carries and changes, by position among the
    carried values.

    Args:
      eqn: The scan or while loop.
      values: Its operands, some of them a :class:`Shard`.
      gatherer: Gathers parameters.
    """
    *_, body = regions(eqn)
    specs = {}
    for i, (result, argument) in enumerate(body.carries):
        x = values[body.operands[argument]]
        pair = body.jaxpr.invars[argument], body.jaxpr.outvars[result]
        if is_on_devices(x, gatherer.axis) and carries_shard(*pair, x.spec, gatherer):
            specs[i] = x.spec
    return specs


def find_constants(
    jaxpr: AnyJaxpr,
    consts: Sequence[object],
    gatherer: Gatherer,
    rows: RowDimensions,
    runs: int | None = None,
) -> set[int]:
    """Returns the positions of a loop's constants that are gathered before the loop: those that
    each iteration needs unsharded, unless they exceed what a loop holds.

    Args:
      jaxpr: The loop's body, or its condition.
      consts: The constants, the body's first operands, some of them a :class:`Shard`.
      gatherer: Gathers parameters.
      rows: The dimensions along which rows of the batch lie.
      runs: The number of iterations; None if unknown.
    """
    specs = [c.spec if isinstance(c, Shard) and not c.is_rounded else None for c in consts]
    if all(spec is None for spec in specs):
        return set()
    opened, _ = jaxprs.open_jaxpr(jaxpr)
    varies = dependent(opened, [i >= len(specs) for i in range(len(opened.invars))])
    uses = Uses(gatherer, rows, varies=varies, runs=runs)
    needed = {
        i
        for i, (v, spec) in enumerate(zip(opened.invars, specs, strict=False))
        if spec is not None and uses.dtypes(opened, v, spec)
    }
    held = sum(opened.invars[i].aval.size for i in needed)
    return needed if held <= gatherer.thresholds.held else set()
