"""A record of the collectives that are emitted while a step is traced, if a caller asks for it.

Each emission site calls :meth:`Ledger.gathers`, :meth:`Ledger.reduces` or :meth:`Ledger.exchanges`
where it emits the constraint that causes the collective. The contexts around the site have the
place in the program, the equation of the user's step, the number of runs, and the leaves of the
state.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from zerojax.collectives import decisions, target_specs
from zerojax.collectives.decisions import Decision, group, payload, summed_over
from zerojax.devices.mesh import STAGE, stage_size, zero_axis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import BRANCHES
from zerojax.graph.reach import dependent
from zerojax.graph.rows import RowDimensions
from zerojax.graph.search import first_inside, first_use, needed_runs
from zerojax.hlo.traffic import ring_bytes
from zerojax.optim.norm import NORM
from zerojax.plan import layout
from zerojax.plan.layout import SpecEntry
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.lines import line
from zerojax.xla.types import AnyJaxpr, Atom, Equation, HasEquations, Jaxpr, MaybeNone, Shaped

T = TypeVar("T")
Run = Callable[[Equation, list[Any]], Sequence[Any]]
"""Function from an equation and its operands to its results."""

_GATHERED = "gathered once a pass, not kept"
_REDUCED = "reduced where the gradient is produced"


@dataclass(frozen=True)
class _Context:
    """The circumstances in which a collective is emitted.

    Attributes:
      where, reason: The place in the program, and the reason for it; empty for the default.
      running: The equations of the user's step that run, each inside the one before.
      by_rows: Whether the innermost one has an array that depends on rows of the batch. Numbers,
        such as a mean over rows, are the same on all devices.
      leaves: The paths of the leaves of the state.
      times, exact, compute: See :class:`zerojax.collectives.decisions.Decision`.
    """

    where: str = ""
    reason: str = ""
    running: tuple[Equation, ...] = ()
    by_rows: bool = True
    leaves: tuple[str, ...] = ()
    times: int = 1
    exact: bool = True
    compute: str = ""


class Ledger:
    """Decisions in the order of emission.

    Args:
      mesh: The mesh of all specs.
      asked: Whether a caller reads the ledger; otherwise the ledger records nothing.

    Attributes:
      decisions: The decisions.
    """

    asked: bool

    def __init__(self, mesh: Mesh, *, asked: bool = False) -> None:
        self.decisions: list[Decision] = []
        self._mesh, self.asked = mesh, asked
        self._contexts = [_Context()]
        self._depends: set[Atom] = set()
        self._looked_up: dict[tuple[int, int], Shaped] = {}
        self._reduced: dict[int, tuple[object, list[Decision]]] = {}
        self._over, self._deferred, self._last = summed_over(mesh), False, 0

    def on_lanes(self, axes: Sequence[str]) -> Ledger:
        """Returns a view of this ledger for a program that runs on lanes along ``axes`` of the
        mesh, over which nothing is summed."""
        lanes = copy.copy(self)
        lanes._over //= math.prod(self._mesh.shape[name] for name in axes)
        return lanes

    def without_reductions(self) -> Ledger:
        """Returns a view of this ledger for a program whose reductions XLA moves after the loop
        that contains it."""
        other = copy.copy(self)
        other._deferred = True
        return other

    def follow(self, jaxpr: Jaxpr, rows: RowDimensions) -> None:
        """Finds the values of the program that runs next that depend on its arguments with rows."""
        if self.asked:
            found = dependent(jaxpr, [bool(rows.dims(v)) for v in jaxpr.invars])
            self._depends = {v for v, depends in found.items() if depends}

    def by_rows(self, *values: Atom) -> bool:
        """Returns whether one of the values depends on rows of the batch, so that devices with
        other rows have other values."""
        return not self._depends.isdisjoint(jaxprs.variables(values))

    def record_reduction(self, values: Sequence[jax.Array], first: int) -> None:
        """Records that the decisions from number ``first`` on reduce a value, the only one; those
        of the last constraint count."""
        if self.asked and self.decisions[first:] and len(values) == 1:
            self._reduced[id(values[0])] = values[0], self.decisions[max(first, self._last) :]

    def awaits(self, values: Iterable[jax.Array]) -> None:
        """Records that other values wait for reduced ones, so that XLA reduces each of them."""
        awaited = {id(sent) for x in values for sent in self._reduced.get(id(x), (x, []))[1]}
        self._reduced = {
            key: (value, sent)
            for key, (value, sent) in self._reduced.items()
            if awaited.isdisjoint(map(id, sent))
        }

    def recording(self, run: Run, jaxpr: HasEquations) -> Run:
        """Returns the function that runs an equation of a program so that the ledger knows which
        one runs."""
        if not self.asked:
            return run
        graph = graph_of(jaxpr)
        needed = {*map(id, graph.backward_slice(jaxpr.outvars).equations)}

        def recorded(eqn: Equation, values: list[Any]) -> Sequence[Any]:
            is_needed = id(eqn) in needed
            with self.within(eqn), contextlib.nullcontext() if is_needed else self.unrecorded():
                outs = run(eqn, values)
            if all(graph.times_used(v) == 1 for v in jaxprs.variables(eqn.invars)):
                self._follow_reduced(eqn, values, outs)
            return outs

        return recorded

    def _follow_reduced(
        self, eqn: Equation, values: Sequence[object], outs: Sequence[object]
    ) -> None:
        """Follows reduced values through an equation."""
        found = [self._reduced.get(id(x), (None, []))[1] for x in values]
        match eqn.primitive.name, found:
            # XLA adds the operands of equal reductions whose results are added up, and reduces
            # once.
            case (("add" | "add_any"), [one, other]) if one is not other and _alike(one, other):
                left_out = {*map(id, one)}
                self.decisions[:] = [each for each in self.decisions if id(each) not in left_out]
                self._reduced[id(outs[0])] = outs[0], other
            case (("transpose" | "reshape" | "squeeze"), [one]) if one:
                self._reduced[id(outs[0])] = outs[0], one

    def record_equations(self, jaxpr: HasEquations) -> None:
        """Records the collectives among the equations of a program that its results need."""
        for run in needed_runs(jaxpr) if self.asked else ():
            with self.within(run.equation), self.repeats(run.times, exact=run.exact):
                self._of_equation(run.equation, run.program)

    def _of_equation(self, eqn: Equation, jaxpr: HasEquations) -> None:
        """Records the norm of the devices' shards, what pipeline stages send to others, and the
        reductions of gradients that reach the optimizer as partial sums."""
        name = eqn.primitive.name
        if marks.is_mark(eqn, marks.GRADIENT):
            (v,), reason = eqn.outvars, "reduced where the optimizer takes the gradient"
            spec = target_specs.of_gradient(jaxpr, v, self._mesh)
            if not target_specs.is_reduced(jaxpr, eqn.invars[0], spec, self._mesh, self.by_rows):
                self.reduces_late(decisions.UPDATE, reason, v.aval, spec)
        elif name == "sqrt" and NORM in str(jaxprs.source(eqn).name_stack):
            with self.place(decisions.UPDATE, decisions.NORM):
                self._note(decisions.REDUCE, eqn.outvars[0].aval, 4, self._mesh.size)
        elif name == "ppermute" and STAGE in jaxprs.param(eqn, "axis_name"):
            x = eqn.outvars[0].aval
            with self.place(decisions.STAGES, "a micro-batch goes to the neighbour in each tick"):
                self._note(decisions.PERMUTE, x, jaxprs.nbytes(x), 2)

    def place(self, where: str, reason: str = "") -> contextlib.AbstractContextManager[None]:
        """Sets the place and the reason of the decisions that are recorded in this context."""
        return self._context(where=where, reason=reason)

    def used_in(self, closed: AnyJaxpr, *values: Atom) -> contextlib.AbstractContextManager[None]:
        """Adds the equation of a program that first uses one of some values, for collectives that
        send these values before it."""
        jaxpr = jaxprs.open_jaxpr(closed)[0]
        return self._used(first_use(jaxpr, v) for v in values)

    def used_by(self, eqn: Equation, i: int) -> contextlib.AbstractContextManager[None]:
        """Does the same for operand ``i`` of a loop or a choice."""
        return self._used(map(first_inside, [eqn], [i]))  # searched only if somebody asks

    def _used(self, found: Iterable[Equation | None]) -> contextlib.AbstractContextManager[None]:
        if not self.asked:
            return contextlib.nullcontext()
        use = next(filter(None, found), None)
        # XLA removes collectives of values without a use.
        return self.unrecorded() if use is None else self.at(use)

    def at(self, eqn: Equation | MaybeNone) -> contextlib.AbstractContextManager[None]:
        """Adds the equation whose line the decisions of this context have."""
        running = self._contexts[-1].running
        return self._context(running=running if eqn is None else (*running, eqn))

    def within(self, eqn: Equation) -> contextlib.AbstractContextManager[None]:
        """Adds an equation to those that run."""
        if not self.asked:
            return contextlib.nullcontext()
        # A jaxpr that JAX has cached has the lines of its first call; the calls around have their
        # own.
        running = *self._contexts[-1].running, eqn
        is_choice = eqn.primitive.name in BRANCHES  # whose branches compute sums, if any
        arrays = [v for v in eqn.invars if v.aval.shape]
        return self._context(running=running, by_rows=not is_choice and self.by_rows(*arrays))

    def of(self, *specs: object) -> contextlib.AbstractContextManager[None]:
        """Sets the leaves of the state to those of the specs; unchanged if they have none."""
        leaves = getattr(layout.with_leaves((), *specs), "leaves", ())
        return self._context(leaves=leaves) if leaves else contextlib.nullcontext()

    def repeats(self, times: int, *, exact: bool = True) -> contextlib.AbstractContextManager[None]:
        """Sets the number of iterations of a loop; not ``exact`` for an unknown number."""
        context = self._contexts[-1]
        return self._context(times=context.times * times, exact=context.exact and exact)

    def computes(self, dtype: str) -> contextlib.AbstractContextManager[None]:
        """Sets the dtype in which products read what is sent in this context."""
        return self._context(compute=dtype)

    def maxima(self, x: Shaped) -> None:
        """Records the all-reduce of largest elements, of ``x``, the largest ones of all arrays."""
        if self.asked and self._mesh.size > 1:
            self._note(decisions.REDUCE, x, jaxprs.nbytes(x), self._mesh.size)

    def _context(self, **fields: Any) -> contextlib.AbstractContextManager[None]:
        if not self.asked:
            return contextlib.nullcontext()
        return self._entered(replace(self._contexts[-1], **fields))

    @contextlib.contextmanager
    def _entered(self, context: _Context) -> Iterator[None]:
        self._contexts.append(context)
        try:
            yield
        finally:
            self._contexts.pop()

    @contextlib.contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Discards the decisions of this context: those of a trace that does not run, or of
        constraints for which XLA emits other collectives."""
        start = len(self.decisions)
        try:
            yield
        finally:
            del self.decisions[start:]

    def last_trace(self, function: Callable[..., T]) -> Callable[..., T]:
        """Returns the body of a loop, so that only the decisions of its last trace count."""
        traced: list[Decision] = []

        def run(*args: object) -> T:
            # JAX traces a loop's body again where the types of its carry do not agree at first.
            earlier = {*map(id, traced)}
            self.decisions[:] = [each for each in self.decisions if id(each) not in earlier]
            start = len(self.decisions)
            result = function(*args)
            traced[:] = self.decisions[start:]
            return result

        return run if self.asked else function

    def gathers(self, x: Shaped, cut: Sequence[SpecEntry], less: Sequence[SpecEntry]) -> None:
        """Records an all-gather: a constraint to ``less`` of an array sharded by ``cut``."""
        if self.asked and (n := group(cut, less, self._mesh)) > 1:
            self._sends(decisions.GATHER, x, cut, less, n)

    def reduces(
        self,
        x: Shaped,
        before: Sequence[SpecEntry],
        after: Sequence[SpecEntry],
        *,
        over: int | None = None,
    ) -> None:
        """Records a reduce-scatter, an all-reduce, or both: a constraint to ``after`` of partial
        sums that are sharded by ``before``. A sum that does not depend on the batch is the same on
        all devices, and needs neither. Numbers, such as a loss, are not recorded.

        Args:
          x: An array of the sum's shape and dtype.
          before, after: The specs.
          over: The number of devices that hold a partial sum; None for all devices with different
            rows or tokens, of one pipeline stage if "stage" shards the array.
        """
        if not self.asked or self._deferred or not x.shape or not self._contexts[-1].by_rows:
            return
        n, self._last = group(after, before, self._mesh), len(self.decisions)
        remaining = (self._summed(before) if over is None else over) // max(n, 1)
        if n > 1:
            self._sends(decisions.SCATTER, x, after, before, n)
        if remaining > 1:
            self._sends(decisions.REDUCE, x, after, after, remaining)

    def reduces_late(self, where: str, reason: str, x: Shaped, spec: Sequence[SpecEntry]) -> None:
        """Records the reduction of a gradient at a constraint to ``spec`` that follows later than
        the equation that computes the gradient."""
        full = layout.without(spec, zero_axis(self._mesh))
        is_even = layout.padded_shape(x.shape, spec, self._mesh) == tuple(x.shape)
        with self.place(where, reason), self.of(spec):
            self.reduces(x, full, spec if is_even else full)  # uneven: XLA slices the full sum

    def instead(self, *sent: tuple[str, Shaped]) -> contextlib.AbstractContextManager[None]:
        """Records the collectives that XLA emits for an equation, as pairs of kind and array, in
        place of those that are recorded in the returned context. The first of several is the
        all-gather of row numbers."""
        if not self.asked or self._over < 2:
            return contextlib.nullcontext()
        if len(sent) > 1:
            (_, indices), *others = sent
            # XLA gathers the same row numbers once.
            key = id(indices), self._contexts[-1].times
            sent = tuple(others) if key in self._looked_up else sent
            self._looked_up[key] = indices
        for kind, x in sent:
            spec = (None,) * len(x.shape)
            self._sends(kind, x, spec, spec, self._over)
        return self.unrecorded()

    def exchanges(self, x: Shaped, spec: Sequence[SpecEntry], devices: int) -> None:
        """Records an all-to-all: a constraint by which devices exchange their shards of ``x``."""
        if self.asked and devices > 1:
            self._sends(decisions.EXCHANGE, x, spec, spec, devices)

    def over(self, parts: Iterable[int], spec: Sequence[SpecEntry]) -> list[int]:
        """Returns the number of devices in each of several successive sums of an array that is
        sharded by ``spec``, the last of which is over all remaining devices."""
        sizes = list(parts)
        return [*sizes[:-1], self._summed(spec) // math.prod(sizes[:-1])]

    def _summed(self, spec: Sequence[SpecEntry]) -> int:
        """Returns the number of devices that hold a partial sum of an array."""
        n = stage_size(self._mesh) if layout.dimensions(spec, STAGE) else 1
        return self._over // n

    def _sends(
        self,
        kind: str,
        x: Shaped,
        cut: Sequence[SpecEntry],
        less: Sequence[SpecEntry],
        devices: int,
    ) -> None:
        self._note(kind, x, payload(x.shape, x.dtype, cut, less, self._mesh), devices)

    def _note(self, kind: str, x: Shaped, sent: int, devices: int) -> None:
        context, gathers = self._contexts[-1], kind == decisions.GATHER
        sources = map(jaxprs.source, reversed(context.running))
        lines = (line(source.traceback, models=True) for source in sources)
        self.decisions.append(
            Decision(
                kind,
                context.leaves,
                tuple(x.shape),
                x.dtype.name,
                round(ring_bytes(kind, sent, devices)),
                context.times,
                context.exact,
                context.where or (decisions.USE if gathers else decisions.PRODUCED),
                context.reason or (_GATHERED if gathers else _REDUCED),
                next(filter(None, lines), ""),
                context.compute,
            )
        )


def _alike(one: Sequence[Decision], other: Sequence[Decision]) -> bool:
    """Returns whether two reductions, if there is one, send arrays of one form in the same way."""
    forms = [[(x.kind, x.shape, x.dtype, x.bytes) for x in each] for each in (one, other)]
    return bool(one) and forms[0] == forms[1]
