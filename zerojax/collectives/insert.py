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

:class:`Inserter` runs the equations; :mod:`zerojax.collectives.scans` runs loops over stacks, and
:mod:`zerojax.collectives.gathering` gathers and reduces. What is gathered or reduced where is
decided before a program or a loop runs (:mod:`zerojax.collectives.decide`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as prims
from jax.sharding import Mesh

from zerojax.collectives import (
    decide,
    decisions,
    gradients,
    lookups,
    order,
    own_rows,
    partial_sums,
    propagate,
    residuals,
    sharded_products,
    target_specs,
)
from zerojax.collectives.decide import ProgramDecisions
from zerojax.collectives.gathering import (
    Replacements,
    Scope,
    Thresholds,
    is_on_devices,
    is_sharded,
    plain,
)
from zerojax.collectives.host import Host, on_host
from zerojax.collectives.narrow import arrived, copy_of_result, like, narrow_of, travelling
from zerojax.collectives.order import Window
from zerojax.collectives.partial_sums import PartialSum
from zerojax.collectives.scans import Loop, Scans
from zerojax.collectives.shard import Gathering, HostStack, Narrow, ReducedGradient, Shard
from zerojax.collectives.uses import Kind, use_of
from zerojax.devices.mesh import batch_devices, sequence_size
from zerojax.distributed import log
from zerojax.graph.primitives import BRANCHES, ELEMENTWISE, LABELS
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.quantized import UNQUANTIZED, Sent
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation


class Inserter(Scans):
    """Runs a traced body on sharded parameters.

    Args:
      mesh: the mesh of all specs.
      axis: the axis over which ZeRO shards.
      keep: True gathers each parameter once and keeps it (stages 1 and 2), False gathers
        where used, drops, and gathers again (stage 3).
      share: whether at stage 3 one gather of a parameter serves all its uses in the body, for a
        body without a backward pass.
      away: the fewest elements per device of a residual of a rematerialised block in a loop that
        waits in host memory for the backward pass; None keeps all residuals on the device.
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
        away: int | None = None,
        overlap: bool = True,
        sent: Sent = UNQUANTIZED,
        thresholds: Thresholds | None = None,
    ) -> None:
        super().__init__(mesh, axis, keep=keep, sent=sent, thresholds=thresholds)
        self.share, self.overlap, self.layers = share or keep, overlap, []
        self.devices = batch_devices(mesh)
        shares = self.devices * sequence_size(mesh)
        self.smallest = None if away is None else away * shares
        self.left = away is None  # True once a residual is offloaded, or the warning is logged

    def __call__(
        self,
        closed: AnyJaxpr,
        args: Sequence[object],
        replace: Replacements | None = None,
        want: Sequence[Spec | None] = (),
        host: Host | None = None,
        rows: RowDimensions | None = None,
    ) -> list[Any]:
        """Evaluates ``closed`` on ``args``, some of them :class:`Shard`; returns plain arrays.

        ``want`` has the target spec of each result that is a gradient, None for the others.
        ``host`` sends gradients to host memory; None keeps them on the devices. ``rows`` are
        the dimensions along which rows of the batch lie, None if unknown.
        """
        is_unlimited = self.keep or self._lane_axes or not self.overlap
        window = None if is_unlimited else Window.of(self.mesh, self.axis, self.thresholds.ahead)
        defers_reductions = self.overlap and not self._lane_axes and host is None
        scope = Scope(
            share=self.share,
            replace=replace or {},
            host=host,
            window=window,
            row_dims=rows or RowDimensions(),
            defers=defers_reductions,
        )
        jaxpr, _ = jaxprs.open_jaxpr(closed)
        self.ledger.follow(jaxpr, scope.row_dims)
        outs = [plain(o) for o in self.run(closed, args, scope, want)]
        self.ledger.record_equations(jaxpr)
        if not self.left and residuals.some_stay(jaxpr):
            self.left = True
            log.warning(residuals.NO_EFFECT)
        return outs

    def run(
        self,
        closed: AnyJaxpr,
        args: Sequence[object],
        scope: Scope,
        want: Sequence[Spec | None] = (),
    ) -> list[Any]:
        """Returns the results of one program (the step, a called function, an iteration, a branch)
        on values some of which are shards; its results may be shards too.

        ``scope`` is the scope in which the program runs, ``want`` as for :meth:`__call__`.
        """
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        decided = decide.decide_program(jaxpr, args, want, self, scope, self.smallest)
        scope = replace(scope, used_unsharded=scope.used_unsharded | decided.used_unsharded)
        env: dict[Atom, Any] = dict(
            zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
        )

        def run(eqn: Equation, values: list[Any]) -> Sequence[Any]:
            if any(isinstance(v, PartialSum) for v in values):
                if partial_sums.links(eqn):
                    return [values[0].then(eqn)]
                values = [
                    partial_sums.total(v, self) if isinstance(v, PartialSum) else v for v in values
                ]
            with jaxprs.traced_where(eqn):
                if (
                    any(isinstance(v, Shard | HostStack) for v in values)
                    or decided.places(eqn)
                    or scope.replaces(eqn)
                    or gradients.at_one_index(eqn)
                    or own_rows.has_rows_for_groups(eqn, scope.row_dims, self.devices)
                    or (self.smallest is not None and residuals.holds_block(eqn))
                ):
                    return self._equation(eqn, values, scope, decided)
                outs = jaxprs.bind(eqn, values)
                at = own_rows.rows_at(eqn, scope.row_dims) if scope.of_step else None
                return outs if at is None else [self.by_rows(outs[0], at)]

        return jaxprs.interpret(jaxpr, env, self.ledger.recording(run, jaxpr))

    def _equation(
        self, eqn: Equation, values: list[Any], scope: Scope, decided: ProgramDecisions
    ) -> Sequence[object]:
        """Runs an equation that takes shards, or for which something was decided: replaces marks,
        enters calls and loops, fetches operands from host memory, and reduces the results that are
        gradients."""
        specs = [decided.wants.get(v) for v in eqn.outvars]
        if (mark := marks.name_of(eqn)) in scope.replace:
            return [scope.replace[mark](*values)]
        if eqn.primitive in jaxprs.CALLS:
            return self._call(eqn, values, scope, specs)
        if (loop := jaxprs.scan_parts(eqn)) is not None:
            want = target_specs.of_scan_body(loop, specs)
            return Loop(self, eqn, values, scope, want, decided.leaving).results()
        if eqn.primitive.name in LABELS and on_host(values[0]):
            return values
        if marks.is_mark(eqn, marks.GRADIENT) or marks.is_mark(eqn, marks.SHARD):
            return jaxprs.bind(eqn, [plain(values[0])])
        values = [self.on_device(v, scope) if on_host(v) else v for v in values]
        if own_rows.has_rows_for_groups(eqn, scope.row_dims, self.devices):
            if eqn.primitive is prims.conv_general_dilated_p:
                unsharded = self.gather_all(values, scope)
                return [own_rows.on_own_rows(eqn, unsharded, self.mesh)]
            return self._branch(eqn, values, scope)
        if any(isinstance(v, Shard) for v in values) or scope.replaces(eqn):
            return self._use(eqn, values, scope)
        if gradients.at_one_index(eqn):
            values[0] = lax.optimization_barrier(values[0])
        if eqn.outvars and (row_sum := scope.row_sums.get(eqn.outvars[0])) is not None:
            return [row_sum.partial(values, self)]
        reductions = [decided.reductions.get(v) for v in eqn.outvars]
        if not any(reductions):
            return jaxprs.bind(eqn, values)
        if (own := reductions[0]) is not None and own.product is not None:
            outs = [own.product.run(values, self, scope, decisions.PRODUCED)]
        else:
            first = len(self.ledger.decisions)
            outs = gradients.bind_reduced(eqn, values, reductions, self)
            self.ledger.record_reduction(outs, first)
        reduced = [
            ReducedGradient(o, each.spec)
            for o, each in zip(outs, reductions, strict=True)
            if each is not None
        ]
        if scope.emitted.reduced:
            scope.emitted.reduced[-1] += reduced
        elif any(is_sharded(gradient.spec, self.axis) for gradient in reduced):
            # A model's head. A wait for an unsharded gradient would only force its all-reduce.
            scope.emitted.reduced.append(reduced)
        return outs

    def _use(self, eqn: Equation, values: Sequence[object], scope: Scope) -> Sequence[object]:
        """Runs an equation on shards if each device can do so on its own, else on the gathered
        arrays."""
        name = eqn.primitive.name
        if name in BRANCHES:
            return self._branch(eqn, values, scope)
        if scope.replaces(eqn):
            raise NotImplementedError(
                f"zerojax.value_and_grad within {name}: call it outside, in the step itself."
            )
        shards = [v for v in values if isinstance(v, Shard)]
        specs = [v.spec if isinstance(v, Shard) else None for v in values]
        # A value that a lane computes from a parameter and its own rows is not a shard.
        only_shards = all(isinstance(v, Shard) or not isinstance(v, jax.Array) for v in values)
        mixes = only_shards or not self.lanes_on_axis
        use = use_of(eqn, specs, self.mesh, self.axis, mixes=mixes)
        is_tied = self.share and not self.keep and scope.emitted.copy_of(shards[0]) is not None
        if is_tied and (name in propagate.FORWARD or name in propagate.TAKES):
            return jaxprs.bind(eqn, self.gather_all(values, scope))  # a tied embedding's head
        if use.kind is Kind.REDUCED:
            return jaxprs.bind(eqn, [plain(v) for v in values])
        if use.kind is Kind.ON_SHARDS:
            return self._on_shards(eqn, values, use.spec)
        if use.kind is Kind.UNCHANGED:
            if name != "optimization_barrier":
                return values
            inputs = [travelling(v) for v in values]
            outs = jaxprs.bind(eqn, [plain(v) for v in inputs])
            return list(map(arrived, values, map(like, inputs, outs)))
        for find in (lookups.find, sharded_products.of_weight):
            if (sends := find(eqn, values, self, scope)) is not None:
                return [sends.run(values, self, scope)]
        outs = jaxprs.bind(eqn, self.gather_all(values, scope))
        if scope.window is not None:
            scope.window.used(shards, outs, [scope.row_dims.dims(v) for v in eqn.outvars])
        return outs

    def _on_shards(self, eqn: Equation, values: Sequence[object], spec: Spec) -> list[Shard]:
        """Runs an equation on shards; ``spec`` is the spec of its result."""
        (out,) = jaxprs.bind(eqn, [plain(v) for v in values])
        gathered = copy_of_result(eqn, values, self.axis, self.thresholds.small)
        source = values[0].gathering.narrow if isinstance(values[0], Shard) else None
        narrow = None
        if source is not None and source.is_cast and propagate.follows(eqn):
            (narrow_out,) = self._on_shards(eqn, [source.shard, *values[1:]], spec)
            narrow = Narrow.cast(narrow_out, out.dtype)
        elif propagate.moves(eqn.primitive.name) or eqn.primitive.name in ELEMENTWISE:
            narrow = narrow_of(eqn, values)
        quantized = all(v.gathering.quantized for v in values if isinstance(v, Shard))
        gathering = Gathering(quantized=quantized, narrow=narrow)
        spec = layout.with_leaves(spec, *(v.spec for v in values if isinstance(v, Shard)))
        return [Shard(self.constrain(out, spec), spec, gathered, gathering)]

    def _call(
        self, eqn: Equation, values: Sequence[object], scope: Scope, want: Sequence[Spec | None]
    ) -> Sequence[object]:
        """Runs a called program. A rematerialised block of the backward pass waits for earlier
        blocks, see :meth:`_in_turn`, and its gradients are recorded for later blocks to wait
        for."""
        inner = jaxprs.called_jaxpr(eqn)
        if eqn.primitive is not prims.remat_p:
            return self.run(inner, values, scope, want)
        if self.keep or not scope.share:
            # Otherwise, in a loop at stage 3, a parameter gathered for one iteration stays a Shard,
            # whose shape shows which values may be gradients.
            values = self.all_known(values, scope)
        if jaxprs.runs_backward(eqn) and jaxprs.param(eqn, "prevent_cse"):
            values = self._in_turn(values, scope)
        outs = self.run(inner, values, scope.inner(scope.row_sums), want)
        summed = [(o, w) for o, w in zip(outs, want, strict=True) if not isinstance(o, PartialSum)]
        scope.emitted.reduced.append(
            [ReducedGradient(plain(o), w) for o, w in summed if w is not None]
        )
        return outs

    def _in_turn(self, values: Sequence[object], scope: Scope) -> list[object]:
        """Holds a block of the backward pass back until its cotangents exist, as ``jax.checkpoint``
        does, and until the gradients of the block before the last exist. Otherwise XLA defers those
        gradients to the end, and keeps the activations that they are computed from. With
        ``overlap`` the block's parameters wait only for the cotangents of the previous block, so
        that they are gathered while the previous block runs."""
        positions = [i for i, v in enumerate(values) if not on_host(v)]
        inputs = [travelling(values[i]) for i in positions]
        held = lax.optimization_barrier([plain(v) for v in inputs])
        early = [i for i, v in enumerate(inputs) if self.overlap and is_on_devices(v, self.axis)]
        others = [x for i, x in enumerate(held) if i not in early]
        emitted = scope.emitted
        earlier = emitted.token if emitted.cotangent is None else emitted.cotangent
        emitted.cotangent = others[-1] if others else None
        if earlier is not None and early:
            _, *delayed = lax.optimization_barrier([earlier, *(plain(inputs[i]) for i in early)])
            for i, x in zip(early, delayed, strict=True):
                held[i] = x
        operands = list(map(like, inputs, held))
        done = emitted.reduced[-2] if len(emitted.reduced) > 1 else []
        self.ledger.awaits(gradient.value for gradient in done)
        operands = order.hold_until(operands, done, self.constrain)
        ordered = dict(zip(positions, operands, strict=True))
        return [arrived(v, ordered[i]) if i in ordered else v for i, v in enumerate(values)]

    def _gathered(self, eqn: Equation, values: Sequence[object], scope: Scope) -> list[object]:
        """Gathers the first operands of a choice or a loop before it, for the uses within. They
        stay shards as well, for equations that run on shards (an average that some steps
        update)."""
        gathered = list(values)
        for i, v in enumerate(values):
            if isinstance(v, Shard) and v.gathered is None:
                with self.ledger.used_by(eqn, i):
                    gathered[i] = v.with_copy(self.gather(v, scope, values))
        return gathered

    def _branch(self, eqn: Equation, values: Sequence[object], scope: Scope) -> Sequence[object]:
        """Runs a ``cond`` or a ``while`` loop. A result of a ``cond`` is a shard if some branch
        returns a shard for it, and all of these have one spec."""
        if eqn.primitive is prims.while_p:
            return self._while(eqn, values, scope)
        # A branch that trains gathers within: that branch may need all of the memory.
        gathers_before = self.keep and not decide.trains(eqn)
        index, *operands = self._gathered(eqn, values, scope) if gathers_before else values
        # By result, the specs of the shards that branches return for it, once they are traced.
        specs: list[set[Spec]] = [set() for _ in eqn.outvars]
        within = self._within(eqn, scope)

        def run(jaxpr: AnyJaxpr) -> list[jax.Array]:
            outs = self.run(jaxpr, operands, within())
            for o, noted in zip(outs, specs, strict=True):
                if isinstance(o, Shard) and not o.gathering.host:
                    noted.add(o.spec)
            return [plain(o) for o in outs]

        branches = [functools.partial(run, each) for each in jaxprs.param(eqn, "branches")]
        chosen = zip(lax.switch(index, branches), specs, strict=True)
        return [
            Shard(self.constrain(o, spec := noted.pop()), spec) if len(noted) == 1 else o
            for o, noted in chosen
        ]

    def _within(self, eqn: Equation, scope: Scope) -> Callable[..., Scope]:
        """Returns a constructor of the scope of a branch or an iteration. A branch or loop that
        contains a complete backward pass is a step of its own."""
        trains = decide.trains(eqn)
        return functools.partial(scope.inner, of_step=trains, share=self.share or not trains)

    def _while(self, eqn: Equation, values: Sequence[Any], scope: Scope) -> Sequence[object]:
        """Runs a ``while`` loop, which carries the state that it updates as shards; constants that
        each iteration needs unsharded are gathered before the loop."""
        loop = jaxprs.while_parts(eqn)
        a, b = loop.cond_consts, loop.cond_consts + loop.body_consts
        updated = decide.find_updated(eqn, values, self)
        specs = [updated.get(i) for i in range(len(values) - b)]
        start = [plain(v) if i in updated else v for i, v in enumerate(values[b:])]
        consts = self._gathered(eqn, values[:b], scope) if self.keep else values[:b]
        within = self._within(eqn, scope)

        def closed(
            jaxpr: AnyJaxpr, consts: Sequence[object], want: Sequence[Spec | None]
        ) -> Callable[[Sequence[jax.Array]], list[Any]]:
            needed = decide.find_constants(jaxpr, consts, self, scope.row_dims)
            consts = self.gather_constants(needed, jaxpr, consts, scope)

            def run(carry: Sequence[jax.Array]) -> list[Any]:
                window = None
                if scope.window is not None:
                    window = Window.of(self.mesh, self.axis, self.thresholds.ahead)
                with self.ledger.place(decisions.LOOP), self.ledger.repeats(1, exact=False):
                    args = (*consts, *self.carried(carry, updated))
                    return self.run(jaxpr, args, within(window=window), want)

            return self.ledger.last_trace(run)

        cond, body = closed(loop.cond, consts[:a], ()), closed(loop.body, consts[a:], specs)
        with self.ledger.place(decisions.BEFORE_LOOP, "the loop needs it unsharded"):
            start = self.gather_all(start, scope)
        final = lax.while_loop(
            lambda carry: plain(cond(carry)[0]),
            lambda carry: list(map(self.passed_on, body(carry), specs)),
            start,
        )
        return [x if spec is None else Shard(x, spec) for x, spec in zip(final, specs, strict=True)]
