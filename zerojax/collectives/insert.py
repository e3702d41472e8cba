"""Insertion of collectives into the user's step, after the step has been traced.

The body is traced to a jaxpr, in which differentiation has already happened, and evaluated equation
by equation. A parameter enters as its shard. Equations that work element by element or only change
the layout run on the shard; an all-gather is inserted before the first equation that needs the
unsharded parameter (a matrix product, a lookup of many rows, a convolution). Loops and
rematerialised blocks are entered, so that a stacked parameter is gathered one layer at a time.

Everything inserted is an identity (a sharding constraint, an optimization barrier, a wait), so the
numbers cannot change, whatever the body does; only arrays that are sent quantized (ZeRO++) are
rounded. Because the same jaxpr contains the backward pass, a parameter is gathered again in the
backward pass without any differentiation rule.

What is gathered or reduced where is decided before the first equation runs: :class:`Decider` walks
through all programs on abstract arrays, by the rules in :mod:`zerojax.collectives.decide`. Then
:class:`zerojax.collectives.emit.Emitter` follows its decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as with_fields
from typing import TypeVar

import jax

from zerojax.collectives import (
    decide,
    gradients,
    lookups,
    own_rows,
    propagate,
    residuals,
    sharded_products,
)
from zerojax.collectives.decide import EquationDecisions, ProgramDecisions
from zerojax.collectives.emit import Emitter, Specs, Values
from zerojax.collectives.gathering import (
    Emitted,
    Replacements,
    Scope,
    plain,
)
from zerojax.collectives.host import Host
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.order import Window
from zerojax.collectives.scans import Loop
from zerojax.collectives.shard import (
    Abstract,
    HostStack,
    Shard,
)
from zerojax.collectives.uses import Kind, use_of
from zerojax.distributed import log
from zerojax.graph.primitives import LABELS
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Value

T = TypeVar("T")


class Inserter(Emitter):
    """Runs a traced body on sharded parameters: decides, and then emits. The arguments are those of
    :class:`zerojax.collectives.emit.Emitter`."""

    def __call__(
        self,
        closed: AnyJaxpr,
        args: Sequence[object],
        replace: Replacements | None = None,
        want: Specs = (),
        host: Host | None = None,
        rows: RowDimensions | None = None,
    ) -> list[Value]:
        """Evaluates ``closed`` on ``args``, some of them :class:`Shard`; returns plain arrays.

        ``want`` has the target spec of each result that is a gradient, None for the others.
        ``host`` sends gradients to host memory; None keeps them on the devices. ``rows`` are
        the dimensions along which rows of the batch lie, None if unknown.
        """
        is_unlimited = self.keep or not self.overlap
        window = None if is_unlimited else Window.of(self.mesh, self.axis, self.thresholds.ahead)
        # Under offload each gradient leaves for host memory in the iteration that computes it, so
        # that it is reduced there.
        defers_reductions = self.overlap and host is None
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        split = [self._split(x) for x in args]
        scope = Scope(
            share=self.share,
            replace=replace or {},
            host=host,
            window=window,
            row_dims=(rows or RowDimensions()).with_weights(jaxpr, split),
            defers=defers_reductions,
        )
        self.ledger.follow(jaxpr, scope.row_dims)
        undelayed = with_fields(scope, window=None, emitted=Emitted())
        given = map(_abstract, jaxpr.invars, args)
        decided, _ = Decider(self).decide(closed, [*given], undelayed, want)
        outs = [plain(o) for o in self.run(closed, args, scope, decided)]
        self.ledger.record_equations(jaxpr)
        # DeepSpeed's cpu_checkpointing moves those of every block; outside loops XLA would defer
        # the copies until they cost memory.
        if not self.left and residuals.some_stay(jaxpr):
            self.left = True
            log.warning(residuals.NO_EFFECT)
        return outs

    def _split(self, x: object) -> int | None:
        """Returns the dimension along which a shard is one; None for other values."""
        dims = layout.dimensions(x.spec, self.axis) if isinstance(x, Shard) else ()
        return dims[0] if len(dims) == 1 else None


class Decider(Emitter):
    """Walks through a step on abstract arrays, emits nothing, and takes each decision where the
    emission will read it.

    Args:
      emitter: Emits the step.
    """

    def __init__(self, emitter: Emitter) -> None:
        vars(self).update(vars(emitter))
        self.ledger = Ledger(self.mesh)

    def decide(
        self, closed: AnyJaxpr, args: Values, scope: Scope, want: Specs
    ) -> tuple[ProgramDecisions, list[Value]]:
        """Returns the decisions on a program, and its abstract results."""
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        decided = decide.decide_program(jaxpr, args, want, self, scope, self.smallest)
        pairs = zip(jaxpr.invars, args, strict=True)
        used_unsharded = {id(x) for v, x in pairs if v in decided.used_unsharded}
        scope = with_fields(scope, used_unsharded=scope.used_unsharded | used_unsharded)
        return decided, self.run(closed, args, scope, decided)

    def within(
        self, at: EquationDecisions, i: int, body: AnyJaxpr, args: Values, scope: Scope, want: Specs
    ) -> list[Value]:
        decided, outs = self.decide(body, args, scope.within(at.eqn), want)
        at.programs.append(decided)
        return outs

    def step(
        self, scope: Scope, decided: ProgramDecisions, eqn: Equation, values: list[Value]
    ) -> Values:
        if rounded := decide.formats_of_product(eqn, values, decided, self, scope):
            decided.rounded[id(eqn)] = rounded
        if not (
            rounded
            or any(isinstance(v, Shard | HostStack) for v in values)
            or not decided.placed.isdisjoint(eqn.outvars)
            or scope.replaces(eqn)
            or gradients.at_one_index(eqn)
            or own_rows.has_rows_for_groups(eqn, scope.row_dims, self.devices)
            or (self.smallest is not None and residuals.holds_block(eqn))
            # The replacement of a mark may send a gradient to host memory.
            or (scope.host is not None and eqn.primitive.name in LABELS)
        ):
            return [v.aval for v in eqn.outvars]
        at = decided.inside[id(eqn)] = EquationDecisions(eqn, decided)
        return self.equation(at, values, scope)

    def bind(self, eqn: Equation, values: Values) -> Values:
        outs = [*map(Abstract.of, eqn.outvars)]
        # The narrow form of a shard has another dtype than the operand in the program.
        is_moved = propagate.follows(eqn) and isinstance(values[0], Abstract)
        return [outs[0].astype(values[0].dtype)] if is_moved else outs

    def emit(self, at: EquationDecisions, emission: Callable[[], Value]) -> Value:
        return [*map(Abstract.of, at.eqn.outvars)]

    def in_fp8(self, at: EquationDecisions, values: list[Value], scope: Scope) -> list[Value]:
        return values

    def barrier(self, values: Values) -> list[Value]:
        return [*values]

    def constrain_always(self, value: Value, spec: Sequence[SpecEntry]) -> Value:
        return value

    def send(self, shard: Shard, scope: Scope, rest: Values) -> Value:
        return shard.value

    def use(self, at: EquationDecisions, values: Values, scope: Scope) -> Values:
        eqn = at.eqn
        specs = [v.spec if isinstance(v, Shard) else None for v in values]
        # A value that a lane computes from a parameter and its own rows is not a shard.
        only_shards = not any(
            isinstance(v, jax.Array | Abstract | jax.core.ShapedArray) for v in values
        )
        mixes = only_shards or not self.lanes_on_axis
        at.use = use_of(eqn, specs, self.mesh, self.axis, mixes=mixes)
        if at.use.kind is Kind.UNSHARDED:
            finders = lookups.find_lookup, sharded_products.of_weight
            found = (find(eqn, values, self, scope) for find in finders)
            at.use = at.use._replace(sends=next((x for x in found if x is not None), None))
        return super().use(at, values, scope)

    def switch(
        self, at: EquationDecisions, index: Value, branches: Sequence[Callable[[], list[Value]]]
    ) -> list[Value]:
        """Walks through all branches. A result is a shard if some branch returns a shard for it,
        and all of these have one spec."""
        specs: list[dict[Spec, None]] = [{} for _ in at.eqn.outvars]
        for branch in branches:
            for o, noted in zip(branch(), specs, strict=True):
                if isinstance(o, Shard) and not o.gathering.host:
                    noted.setdefault(o.spec)
        # A result of a cond has one sharding, whichever branch runs.
        at.results = [next(iter(noted)) if len(noted) == 1 else None for noted in specs]
        outs = zip(map(Abstract.of, at.eqn.outvars), at.results, strict=True)
        return [o if spec is None else Shard(o, spec) for o, spec in outs]

    def while_loop(
        self, at: EquationDecisions, values: Values, scope: Scope, inner: Callable[..., Scope]
    ) -> Values:
        loop = jaxprs.while_parts(at.eqn)
        a, b = loop.cond_consts, loop.cond_consts + loop.body_consts
        programs = (loop.cond, values[:a]), (loop.body, values[a:b])
        at.loop = decide.WhileDecisions(
            decide.find_updated(at.eqn, values, self),
            [decide.find_constants(*each, self, scope.row_dims) for each in programs],
        )
        return super().while_loop(at, values, scope, inner)

    def iterate(self, cond: Callable[[T], Value], body: Callable[[T], T], start: T) -> T:
        cond(start)
        return body(start)

    def scan(self, at: EquationDecisions, values: Values, scope: Scope) -> list[Value]:
        filled = [scope.emitted.as_filled(v) for v in values]
        updated = decide.find_updated(at.eqn, filled, self)
        known = self.known_operands(jaxprs.scan_parts(at.eqn), filled, updated, scope)
        prefetches = self.overlap and not self.keep
        at.scan = decide.decide_loop(at, known, updated, self, scope, prefetches=prefetches)
        return Loop(self, at, values, scope).abstract_results()


def _abstract(v: Atom, x: Value) -> Value:
    """Returns an argument of a step with abstract arrays in place of arrays."""
    value = Abstract.of(v)
    if not isinstance(x, Shard):
        return value
    copy = x.gathered and x.gathered._replace(array=value.astype(x.gathered.array.dtype))
    return with_fields(x, value=value, gathered=copy)
