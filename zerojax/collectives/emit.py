"""Emission of a traced step on shards: each equation is run by the decisions on it.

:class:`Emitter` runs the equations, :mod:`zerojax.collectives.scans` loops over stacks, and
:mod:`zerojax.collectives.gathering` gathers and reduces. They write the constraints, barriers and
copies, and decide nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
from jax import lax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import (
    decide,
    decisions,
    gradients,
    order,
    own_rows,
    partial_sums,
    propagate,
)
from zerojax.collectives.decide import EquationDecisions, ProgramDecisions
from zerojax.collectives.gathering import (
    Scope,
    Thresholds,
    is_on_devices,
    is_sharded,
    plain,
)
from zerojax.collectives.host import on_host
from zerojax.collectives.narrow import arrived, copy_of_result, like, narrow_of, travelling
from zerojax.collectives.order import Window
from zerojax.collectives.partial_sums import PartialSum
from zerojax.collectives.scans import Loop, Scans
from zerojax.collectives.shard import (
    Gathering,
    Narrow,
    ReducedGradient,
    Shard,
)
from zerojax.collectives.uses import Kind
from zerojax.devices.mesh import batch_devices, sequence_size
from zerojax.graph.primitives import BRANCHES, CAST, ELEMENTWISE, LABELS
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.quantized import UNQUANTIZED, Sent
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Value

T = TypeVar("T")
Values = Sequence[Value]
Specs = Sequence[Spec | None]


class Emitter(Scans):
    """Runs programs on shards, by decisions that were taken before.

    Args:
      mesh: the mesh of all specs.
      axis: the axis over which ZeRO shards.
      keep: True gathers each parameter once and keeps it (stages 1 and 2), False gathers
        where used, drops, and gathers again (stage 3).
      share: whether at stage 3 one gather of a parameter serves all its uses in the body, for a
        body without a backward pass.
      overlap: whether loops gather one iteration ahead and reduce one iteration later, and gathers
        outside loops wait for the window, see :mod:`zerojax.collectives.order`.
      sent: the formats in which parameters and gradients are sent.
      thresholds: the sizes on which decisions depend.
    """

    devices: int
    smallest: int | None

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        *,
        keep: bool,
        share: bool = False,
        overlap: bool = True,
        sent: Sent = UNQUANTIZED,
        thresholds: Thresholds | None = None,
    ) -> None:
        super().__init__(mesh, axis, keep=keep, sent=sent, thresholds=thresholds)
        self.share, self.overlap, self.layers = share or keep, overlap, []
        self.devices = batch_devices(mesh)
        shares, away = self.devices * sequence_size(mesh), self.thresholds.away
        self.smallest = None if away is None else away * shares
        self.left = away is None  # True once a residual is offloaded, or the warning is logged

    def run(
        self, closed: AnyJaxpr, args: Values, scope: Scope, decided: ProgramDecisions
    ) -> list[Value]:
        """Returns the results of one program (the step, a called function, an iteration, a branch)
        on values some of which are shards; its results may be shards too."""
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        env: dict[Atom, Value] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )

        step = functools.partial(self.step, scope, decided)
        return jaxprs.interpret(jaxpr, env, self.ledger.recording(step, jaxpr))

    def within(
        self, at: EquationDecisions, i: int, body: AnyJaxpr, args: Values, scope: Scope, want: Specs
    ) -> list[Value]:
        """Returns the results of program ``i`` inside an equation; ``want`` is for the decisions on
        the program."""
        return self.run(body, args, scope.within(at.eqn), at.programs[i])

    def step(
        self, scope: Scope, decided: ProgramDecisions, eqn: Equation, values: list[Value]
    ) -> Values:
        """Runs one equation of a program."""
        if any(isinstance(v, PartialSum) for v in values):
            if len(values) == 2 and all(isinstance(v, PartialSum) for v in values):
                return [self._added(eqn, values, scope, decided)]
            if partial_sums.links(eqn):
                # On the sum's shard the equation has 1/n of the elements that it has on the partial
                # sum of each of n devices.
                return [values[0].then(eqn)]
            values = [
                partial_sums.total(v, self) if isinstance(v, PartialSum) else v for v in values
            ]
        # So that profiles, and the text that XLA compiles, show the user's line and scope.
        with jaxprs.traced_where(eqn):
            if (at := decided.inside.get(id(eqn))) is not None:
                return self.equation(at, values, scope)
            outs = jaxprs.bind(eqn, values)
            dimension = own_rows.rows_at(eqn, scope.row_dims) if scope.of_step else None
            # XLA would replicate rows that an update takes by index, and each device would compute
            # on all.
            return outs if dimension is None else [self.by_rows(outs[0], dimension)]

    def _added(
        self, eqn: Equation, terms: Values, scope: Scope, decided: ProgramDecisions
    ) -> PartialSum | jax.Array:
        """Returns the sum of the partial sums of two blocks; of all blocks, reduced."""
        both, out, emitted = terms[0].plus(terms[1], self), eqn.outvars[0], scope.emitted
        is_last = out in decided.block_sums
        sums = [x for x in emitted.current.sums if x is not terms[0] and x is not terms[1]]
        emitted.current = emitted.current._replace(sums=[*sums, *[both] * (not is_last)])
        if not is_last:
            return both
        place = self.ledger.place(decisions.PRODUCED, "summed over all blocks first")
        with place, self.ledger.of(decided.wants[out]):
            return partial_sums.total(both, self)

    def emit(self, at: EquationDecisions, emission: Callable[[], T]) -> T:
        """Runs an emission, whose results are arrays like those of the equation."""
        return emission()

    def barrier(self, values: Values) -> list[Value]:
        """Sends arrays through an optimization barrier."""
        return list(lax.optimization_barrier([*values]))

    def equation(self, at: EquationDecisions, values: list[Value], scope: Scope) -> Values:
        """Runs an equation on which something was decided: replaces marks, enters calls and loops,
        fetches operands from host memory, and reduces the results that are gradients."""
        eqn, name = at.eqn, at.eqn.primitive.name
        if not scope.share and any(isinstance(v, Shard) for v in values):
            scope.emitted.begin_pass(is_backward=jaxprs.is_backward(eqn))
        if (mark := marks.name_of(eqn)) in scope.replace:
            return self.emit(at, lambda: [scope.replace[mark](*values)])
        if eqn.primitive in jaxprs.CALLS:
            return self._call(at, values, scope)
        if eqn.primitive is prims.scan_p:
            return self.scan(at, values, scope)
        # A label computes nothing: the array stays in host memory until an equation needs it.
        if name in LABELS and on_host(values[0]):
            return values
        if marks.is_mark(eqn, marks.GRADIENT) or marks.is_mark(eqn, marks.SHARD):
            return self.bind(eqn, [plain(values[0])])
        values = [self.on_device(v, scope) if on_host(v) else v for v in values]
        has_rows_for_groups = own_rows.has_rows_for_groups(eqn, scope.row_dims, self.devices)
        if has_rows_for_groups and eqn.primitive is prims.conv_general_dilated_p:
            unsharded = self.gather_all(values, scope)
            return self.emit(at, lambda: [own_rows.on_own_rows(eqn, unsharded, self.mesh)])
        has_shards = any(isinstance(v, Shard) for v in values)
        values = self.in_fp8(at, values, scope)
        if has_rows_for_groups or (name in BRANCHES and (has_shards or scope.replaces(eqn))):
            return self._branch(at, values, scope)
        if scope.replaces(eqn):
            raise NotImplementedError(
                f"zerojax.value_and_grad within {name}: call it outside, in the step itself."
            )
        if has_shards:
            return self.use(at, values, scope)
        if gradients.at_one_index(eqn):
            # XLA would merge the slice that shards the scattered array with the slice of its one
            # row.
            values[:1] = self.barrier(values[:1])
        if eqn.outvars and (row_sum := scope.row_sums.get(eqn.outvars[0])) is not None:
            return self.emit(at, lambda: [row_sum.partial(values, self)])
        if not any(at.reductions):
            return self.bind(eqn, values)
        return self.emit(at, lambda: self._reduced(at, values, scope))

    def in_fp8(self, at: EquationDecisions, values: list[Value], scope: Scope) -> list[Value]:
        """Rounds the operands of a product that runs in fp8, other than the parameter."""
        formats = at.rounded or [None] * len(values)
        return [
            x if format is None else self.rounded(x, format, scope.row_dims.dims(v))
            for x, format, v in zip(values, formats, at.eqn.invars, strict=True)
        ]

    def _reduced(self, at: EquationDecisions, values: Values, scope: Scope) -> Sequence[jax.Array]:
        """Runs an equation some of whose results are gradients, and reduces those."""
        if (own := at.reductions[0]) is not None and own.product is not None:
            outs = [own.product.run(values, self, scope, decisions.PRODUCED)]
        else:
            first = len(self.ledger.decisions)
            outs = gradients.bind_reduced(at.eqn, values, at.reductions, self)
            self.ledger.record_reduction(outs, first)
        reduced = [
            ReducedGradient(o, each.spec)
            for o, each in zip(outs, at.reductions, strict=True)
            if each is not None
        ]
        if scope.emitted.reduced:
            scope.emitted.reduced[-1] += reduced
        elif any(is_sharded(gradient.spec, self.axis) for gradient in reduced):
            # A model's head. A wait for an unsharded gradient would only force its all-reduce.
            scope.emitted.reduced.append(reduced)
        return outs

    def use(self, at: EquationDecisions, values: Values, scope: Scope) -> Values:
        """Runs an equation on shards if each device can do so on its own, else on the gathered
        arrays."""
        eqn, kind = at.eqn, at.use.kind
        if kind is Kind.REDUCED:
            return self.bind(eqn, [plain(v) for v in values])
        if kind is Kind.ON_SHARDS:
            return self._moved(eqn, values, at.use.spec, scope)
        if kind is Kind.UNCHANGED:
            if eqn.primitive.name != "optimization_barrier":
                return values
            # A barrier passes shards on: gathered for it, a parameter would be unsharded from the
            # barrier to its use.
            inputs = [travelling(v) for v in values]
            outs = self.barrier([plain(v) for v in inputs])
            return list(map(arrived, values, map(like, inputs, outs)))
        if not at.rounded:  # only products read codes
            values = [v.uncoded() if isinstance(v, Shard) else v for v in values]
        if (sends := at.use.sends) is not None:
            return self.emit(at, lambda: [sends.run(values, self, scope)])
        results = self.bind(eqn, self.gather_all(values, scope))
        if scope.window is not None:
            shards = [v for v in values if isinstance(v, Shard)]
            scope.window.used(shards, results, [scope.row_dims.dims(v) for v in eqn.outvars])
        return results

    def _moved(self, eqn: Equation, values: Values, spec: Spec, scope: Scope) -> list[Shard]:
        """Runs an equation on shards. An equation that repeats an earlier cast or change of layout
        returns the same shard, and one on a parameter that was gathered is repeated on the
        unsharded array: a table that was looked up before its transpose is multiplied."""
        emitted, name = scope.emitted, eqn.primitive.name
        if len(eqn.invars) > 1 or not (propagate.follows(eqn) or name == CAST):
            return self._on_shards(eqn, values, spec)
        key = id(values[0]), name, str(eqn.params)
        if key not in emitted.moved:
            (out,) = self._on_shards(eqn, values, spec)
            emitted.moved[key] = values[0], out
            if (copy := emitted.copy_of(values[0])) is not None:
                emitted.gathered[id(out)] = out, self.bind(eqn, [copy])[0]
        return [emitted.moved[key][1]]

    def _on_shards(self, eqn: Equation, values: Sequence[object], spec: Spec) -> list[Shard]:
        """Runs an equation on shards; ``spec`` is the spec of its result."""
        (out,) = self.bind(eqn, [plain(v) for v in values])
        gathered = copy_of_result(eqn, values, self)
        source = values[0].gathering.narrow if isinstance(values[0], Shard) else None
        narrow = None
        if source is not None and source.is_cast and propagate.follows(eqn):
            (narrow_out,) = self._on_shards(eqn, [source.shard, *values[1:]], spec)
            narrow = Narrow.cast(narrow_out, out.dtype)
        elif propagate.moves(eqn.primitive.name) or eqn.primitive.name in ELEMENTWISE:
            narrow = narrow_of(eqn, values, self)
        quantized = all(v.gathering.quantized for v in values if isinstance(v, Shard))
        first = values[0].gathering.scale if isinstance(values[0], Shard) else None
        scale = first if propagate.follows(eqn) else None
        gathering = Gathering(quantized=quantized, narrow=narrow, scale=scale)
        spec = layout.with_leaves(spec, *(v.spec for v in values if isinstance(v, Shard)))
        return [Shard(self.constrain(out, spec), spec, gathered, gathering)]

    def _call(self, at: EquationDecisions, values: Values, scope: Scope) -> list[Value]:
        """Runs a called program. A rematerialised block of the backward pass waits for earlier
        blocks, see :meth:`_in_turn`, and its gradients are recorded for later blocks to wait
        for."""
        eqn, called = at.eqn, jaxprs.called_jaxpr(at.eqn)
        if eqn.primitive is not prims.remat_p:
            return self.within(at, 0, called, values, scope, at.wants)
        row_sums = at.program.row_sums(eqn)
        inner = scope.inner({**scope.row_sums, **row_sums})
        given = values
        if not scope.share:
            values = [self._reused(v, scope) for v in values]
        if self.keep or not scope.share:
            # Otherwise, in a loop at stage 3, a parameter gathered for one iteration stays a Shard,
            # whose shape shows which values may be gradients.
            values = self.all_known(values, scope)
        # In a scan, for which jax.checkpoint is told prevent_cse=False, an iteration waits for the
        # one before anyway.
        if jaxprs.runs_backward(eqn) and jaxprs.param(eqn, "prevent_cse"):
            values = self._in_turn(values, scope)
            if sums := [x.value for x in scope.emitted.current.sums if isinstance(x, PartialSum)]:
                values = order.hold_rows(eqn, values, sums, scope.row_dims, self.mesh)
        outs = self.within(at, 0, called, values, inner, at.wants)
        if not scope.share:
            # A later block of the pass that uses the same parameter need not gather it.
            for v, used in zip(given, values, strict=True):
                if isinstance(used, Shard) and (copy := inner.emitted.copy_of(used)) is not None:
                    scope.emitted.gathered[id(v)] = v, copy
        gradients = [
            ReducedGradient(plain(o), spec)
            for o, spec in zip(outs, at.wants, strict=True)
            if spec is not None and not isinstance(o, PartialSum)
        ]
        self.emit(at, lambda: scope.emitted.reduced.append(gradients))
        if row_sums:
            current, new = scope.emitted.current, [o for o in outs if isinstance(o, PartialSum)]
            scope.emitted.current = current._replace(sums=[*current.sums, *new])
        return outs

    def _reused(self, v: Value, scope: Scope) -> Value:
        """Returns a shard with its unsharded array if an earlier use of the pass has gathered it;
        other values unchanged."""
        # XLA multiplies no codes behind a barrier that follows their dequantization.
        if not isinstance(v, Shard) or v.gathered is not None or v.in_fp8:
            return v
        copy = scope.emitted.reuse(v, self.thresholds.ahead)
        return v if copy is None else v.with_copy(copy)

    def _in_turn(self, values: Values, scope: Scope) -> list[Value]:
        """Holds a block of the backward pass back until its cotangents exist, as ``jax.checkpoint``
        does, and until the gradients of the block before the last exist. With ``overlap`` the
        block's parameters wait only for the cotangents of the previous block, so that they are
        gathered while the previous block runs."""
        positions = [i for i, v in enumerate(values) if not on_host(v)]
        inputs = [travelling(values[i]) for i in positions]
        # In place of the barrier to which JAX lowers a checkpoint: the block is inlined here.
        held = self.barrier([plain(v) for v in inputs])
        early = [i for i, v in enumerate(inputs) if self.overlap and is_on_devices(v, self.axis)]
        others = [x for i, x in enumerate(held) if i not in early]
        emitted = scope.emitted
        earlier = emitted.token if emitted.cotangent is None else emitted.cotangent
        emitted.cotangent = others[-1] if others else None
        if earlier is not None and early:
            _, *delayed = self.barrier([earlier, *(plain(inputs[i]) for i in early)])
            for i, x in zip(early, delayed, strict=True):
                held[i] = x
        operands = list(map(like, inputs, held))
        # Those of the last block are reduced beside this one: if it waited for them too, the GPT
        # would take 2.97 ms a step by forecast, not 2.65.
        done = emitted.reduced[-2] if len(emitted.reduced) > 1 else []
        self.ledger.awaits(gradient.value for gradient in done)
        # XLA would defer those gradients to the end, and keep the activations that they are
        # computed from: a GPT of 6 layers on 8 H100s takes 97 MB of temporaries for 48.
        operands = order.hold_until(operands, done, self.constrain)
        ordered = dict(zip(positions, operands, strict=True))
        return [arrived(v, ordered[i]) if i in ordered else v for i, v in enumerate(values)]

    def _gathered(self, eqn: Equation, values: Values, scope: Scope) -> list[Value]:
        """Gathers the first operands of a choice or a loop before it, for the uses within. They
        stay shards as well, for equations that run on shards (an average that some steps
        update)."""
        gathered = list(values)
        for i, v in enumerate(values):
            if isinstance(v, Shard) and v.gathered is None:
                with self.ledger.used_by(eqn, i):
                    gathered[i] = v.with_copy(self.gather(v, scope, values))
        return gathered

    def _branch(self, at: EquationDecisions, values: Values, scope: Scope) -> Values:
        """Runs a ``cond`` or a ``while`` loop. One that contains a complete backward pass is a step
        of its own."""
        trains = decide.trains(at.eqn)
        inner = functools.partial(scope.inner, of_step=trains, share=self.share or not trains)
        if at.eqn.primitive is prims.while_p:
            return self.while_loop(at, values, scope, inner)
        # A branch that trains gathers within: that branch may need all of the memory.
        gathers_before = self.keep and not trains
        index, *operands = self._gathered(at.eqn, values, scope) if gathers_before else values

        def run(i: int, branch: AnyJaxpr) -> list[Value]:
            return self.within(at, i, branch, operands, inner(), ())

        branches = enumerate(jaxprs.param(at.eqn, "branches"))
        return self.switch(at, index, [functools.partial(run, *each) for each in branches])

    def switch(
        self, at: EquationDecisions, index: Value, branches: Sequence[Callable[[], list[Value]]]
    ) -> list[Value]:
        """Runs one of several branches."""

        # lax.switch takes arrays, of the same types in all branches.
        def run(branch: Callable[[], list[Value]]) -> list[jax.Array]:
            return [plain(o) for o in branch()]

        outs = lax.switch(index, [functools.partial(run, each) for each in branches])
        return [
            o if spec is None else Shard(self.constrain(o, spec), spec)
            for o, spec in zip(outs, at.results, strict=True)
        ]

    def while_loop(
        self, at: EquationDecisions, values: Values, scope: Scope, inner: Callable[..., Scope]
    ) -> Values:
        """Runs a ``while`` loop, which carries the state that it updates as shards; constants that
        each iteration needs unsharded are gathered before the loop. ``inner`` constructs the scope
        of an iteration."""
        loop = jaxprs.while_parts(at.eqn)
        a, b = loop.cond_consts, loop.cond_consts + loop.body_consts
        specs = [at.loop.updated.get(i) for i in range(len(values) - b)]
        start = [plain(v) if i in at.loop.updated else v for i, v in enumerate(values[b:])]
        consts = self._gathered(at.eqn, values[:b], scope) if self.keep else values[:b]

        def closed(
            i: int, jaxpr: AnyJaxpr, consts: Values, want: Specs
        ) -> Callable[[Sequence[jax.Array]], list[Value]]:
            consts = self.gather_constants(at.loop.constants[i], jaxpr, consts, scope)

            def run(carry: Sequence[jax.Array]) -> list[Value]:
                window = None
                if scope.window is not None:
                    window = Window.of(self.mesh, self.axis, self.thresholds.ahead)
                with self.ledger.place(decisions.LOOP), self.ledger.repeats(1, exact=False):
                    args = (*consts, *self.carried(carry, at.loop.updated))
                    return self.within(at, i, jaxpr, args, inner(window=window), want)

            return self.ledger.last_trace(run)

        cond, body = closed(0, loop.cond, consts[:a], ()), closed(1, loop.body, consts[a:], specs)
        with self.ledger.place(decisions.BEFORE_LOOP, "the loop needs it unsharded"):
            start = self.gather_all(start, scope)
        final = self.iterate(
            lambda carry: plain(cond(carry)[0]),
            lambda carry: list(map(self.passed_on, body(carry), specs)),
            start,
        )
        return [x if spec is None else Shard(x, spec) for x, spec in zip(final, specs, strict=True)]

    def iterate(self, cond: Callable[[T], Value], body: Callable[[T], T], start: T) -> T:
        """Runs the iterations of a ``while`` loop."""
        return lax.while_loop(cond, body, start)

    def scan(self, at: EquationDecisions, values: Values, scope: Scope) -> list[Value]:
        """Runs a scan."""
        self.layers.append(at.scan.layer)
        return Loop(self, at, values, scope).results()
