"""A traced step whose loops over layers run as pipelines.

The rest of the step is unchanged: embedding, head and loss are computed on the global batch, whose
rows all devices share. A layer computes each row of the batch separately, or sums over rows, so
that its loop gives the same numbers micro-batch by micro-batch; the analysis of
:mod:`zerojax.accumulation` proves this, or the step is refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import MIXES, Choices
from zerojax.accumulation.flat import Flat
from zerojax.accumulation.instances import global_instance, instance
from zerojax.accumulation.kinds import FIXED, RowKind, mixed
from zerojax.accumulation.roles import Roles
from zerojax.accumulation.run import Trace, accumulator, symbolic_step
from zerojax.accumulation.symbolic import TracedRows, UnevenError, growing
from zerojax.collectives.gathering import plain
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, LABELS, RESHAPES
from zerojax.pipeline.loop import LayerLoop
from zerojax.pipeline.schedule import Schedule
from zerojax.pipeline.slots import Slots, to_slots
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, PyTree, Value

_FOLLOWED = ELEMENTWISE | LABELS
_BROADCASTS = _FOLLOWED | RESHAPES
_RESIDUAL = -1
"""In place of a parameter's position, for layers that another loop over layers returns."""


class Pipeline:
    """A step with pipelined loops.

    Args:
      closed: The step on the global batch.
      trace: Traces the step on other batches.
      batch: The global batch, leaves [rows, ...].
      roles: The roles of the step's arguments.
      params: For each parameter, or each array of a state whose parameters are not known, whether
        its first dimension is sharded over "stage". They are the first arguments of the step.
      schedule: The devices and micro-batches.
      dtype: Dtype in which gradients are summed; None for their own, float32 at least.

    Raises:
      ValueError: The step has no loop over layers, or a layer combines rows of the batch.
    """

    def __init__(
        self,
        closed: AnyJaxpr,
        trace: Trace,
        batch: PyTree,
        roles: Roles,
        params: Sequence[bool],
        schedule: Schedule,
        dtype: jax.typing.DTypeLike | None,
    ) -> None:
        self._name, self._paths = roles.name, roles.paths
        self._schedule, self._dtype = schedule, dtype
        (n,) = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        self._rows = n // schedule.parts
        # Functions of all devices are traced on as many rows for each as a stage runs.
        each = self._rows * schedule.stages * schedule.row_devices
        # On one number of rows alone, nothing shows which dimensions grow.
        rows = TracedRows(n, each if each != n else 2 * each)
        try:
            self._symbolic = symbolic_step(trace, closed, batch, roles, rows)
            self._flat = self._symbolic.flat
            self._loops = self._found(params)
        except UnevenError as e:
            raise ValueError(
                f"{self._name} cannot run in pipeline stages: it depends on the number of rows "
                f"({e}{e.contrast}). {e.remedy or ''}".rstrip()
            ) from e

    def _found(self, params: Sequence[bool]) -> dict[int, LayerLoop]:
        """Returns the loops over layers, by the position of their equations."""
        found: dict[int, LayerLoop] = {}
        flat, graph = self._flat, graph_of(self._flat)

        def follow(eqn: Equation, layers: Sequence[int | None]) -> list[int | None]:
            n = len(eqn.outvars)
            if eqn.primitive.name in _FOLLOWED:
                return [next((i for i in layers if i is not None), None)] * n
            if not (stacks := _stacks_of(eqn, layers)):
                return [None] * n
            self._check_layers(eqn, stacks, params)
            found[graph.place(eqn)] = self._loop(eqn)
            carry = jaxprs.scan_parts(eqn).carry
            return [*[None] * carry, *[_RESIDUAL] * (n - carry)]

        # By value, the parameter that holds its layers.
        layers: defaultdict[Atom, int | None] = defaultdict(lambda: None)
        layers.update(zip(flat.invars, range(len(params)), strict=False))
        jaxprs.interpret(flat, layers, follow, lambda literal: None)
        if not found:
            raise ValueError(
                f"{self._name} has no loop over layers for {self._schedule.stages} pipeline "
                "stages: use flax.linen.scan, nnx.scan or jax.lax.scan, with stacked parameters"
            )
        return found

    def _check_layers(self, eqn: Equation, layers: Sequence[int], params: Sequence[bool]) -> None:
        """Refuses a loop whose layers the stages do not divide, or do not store."""
        n, stages = jaxprs.scan_parts(eqn).length, self._schedule.stages
        if n % stages:
            fits = [k for k in range(1, n + 1) if n % k == 0]
            raise ValueError(
                f"{self._name}: {stages} pipeline stages do not divide the {n} layers of the loop "
                f"at {where(eqn)}: set the axis 'stage' to one of {fits}"
            )
        missing = [i for i in layers if i != _RESIDUAL and not params[i]]
        if missing:
            raise ValueError(
                f"{self._name}: the loop over layers at {where(eqn)} reads "
                f"{self._paths[missing[0]]}, not sharded over the stages: put all stacks into "
                'params["layers"], or pass specs with PartitionSpec("stage") for them'
            )

    def _loop(self, eqn: Equation) -> LayerLoop:
        """Returns a scan over layers for one device's rows of one micro-batch."""
        if eqn.effects:  # which idle ticks would have too, on rows of no micro-batch
            raise ValueError(
                f"{self._name} cannot run in pipeline stages: a layer prints, or calls back into "
                f"Python ({where(eqn)}): return the numbers and print them outside"
            )
        scan = jaxprs.scan_parts(eqn)
        given = [self._kind(v, eqn) for v in eqn.invars]
        alone = dataclasses.replace(self._symbolic, flat=_as_program(eqn))
        analysis = Analysis(alone, given, self._rows, Choices())
        results = [analysis.kind(v).added for v in eqn.outvars]
        for kind in results:
            self._check(kind, eqn)
        (micro,) = instance(alone, alone.flat, self._rows, frozenset(analysis.own)).eqns
        dtypes = [
            accumulator(v.aval.dtype, self._dtype if i >= scan.carry else None)
            if kind.reduced and jnp.issubdtype(v.aval.dtype, jnp.inexact)
            else v.aval.dtype
            for i, (v, kind) in enumerate(zip(eqn.outvars, results, strict=True))
        ]
        same: dict[int, Flat] = {}
        for i, v in enumerate(eqn.invars[: scan.consts]):
            if given[i].rows and (program := self._same_for_all(v)) is not None:
                same[i], given[i] = program, FIXED
        return LayerLoop(micro, given, results, dtypes, eqn, self._rows, same)

    def _kind(self, v: Atom, eqn: Equation) -> RowKind:
        """Returns the kind of an operand by its shape: every position along the dimension that
        grows holds rows, whatever they were computed from."""
        dims = growing(v)
        if len(dims) > 1:
            shape = self._symbolic.global_shape(v)
            return mixed(MIXES, where(eqn), shape)
        if dims:
            return RowKind("rows", dim=dims[0], outer=1)
        return FIXED.but(zero=graph_of(self._flat).is_zeros(v))

    def _same_for_all(self, v: Atom) -> Flat | None:
        """Returns the program of a constant that has the same numbers for all rows, such as a mask
        that jax has broadcast to them before the loop, on the rows of one device; None for other
        constants."""
        program = graph_of(self._flat).backward_slice([v], lambda x: not growing(x))
        are_broadcasts = {eqn.primitive.name for eqn in program.equations} <= _BROADCASTS
        if not are_broadcasts or any(map(growing, program.ends)):
            return None
        flat = dataclasses.replace(
            self._flat, invars=[*program.ends], eqns=[*program.equations], outvars=[v], constvars=[]
        )
        return instance(self._symbolic, flat, self._rows, frozenset())

    def _check(self, kind: RowKind, eqn: Equation) -> None:
        if kind.problem is not None:
            why = f"{kind.problem.why} ({kind.problem.where})"
        elif kind.index:
            why = f"computes with row numbers ({where(eqn)})"
        elif not (kind.rows or kind.reduced or kind.name == "fixed"):
            why = f"computes with sums over all rows ({where(eqn)})"
        else:
            return
        raise ValueError(
            f"{self._name} cannot run in pipeline stages: a layer {why}, so that micro-batches "
            "would give other numbers. Compute it for each row (GroupNorm) or outside the loop"
        )

    def traced(self) -> tuple[Jaxpr, tuple[Any, ...]]:
        """Returns the open jaxpr of the step, which has the same arguments, and its constants:
        those of the step that are shards are the same shards."""
        flat = global_instance(self._symbolic, self._flat)
        arrays = [plain(x) for x in flat.consts]
        shapes = [jaxprs.like(v.aval) for v in flat.invars]
        closed = jax.make_jaxpr(functools.partial(self._run, flat, *arrays))(*shapes)
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        # Arrays that the trace closes over are its constants, as the same objects.
        given = {id(x): const for x, const in zip(arrays, flat.consts, strict=True)}
        return jaxpr, tuple(given.get(id(x), x) for x in consts)

    def _run(self, flat: Flat, *values: jax.Array) -> list[Any]:
        env: dict[Atom, Any] = dict(zip((*flat.constvars, *flat.invars), values, strict=True))
        graph, schedule = graph_of(flat), self._schedule

        def operand(loop: LayerLoop, i: int, x: Value) -> jax.Array:
            if loop.is_stored(i):
                is_ready = isinstance(x, Slots)
                return x.array if is_ready else to_slots(x, loop.operands[i].dim, schedule)
            if (same := loop.same_for_all.get(i)) is None:
                return _rows(x)
            return jaxprs.interpret(same, {v: _rows(env[v]) for v in same.invars}, jaxprs.bind)[0]

        def run(eqn: Equation, values: Sequence[Value]) -> Sequence[Value]:
            with jaxprs.traced_where(eqn):
                if (loop := self._loops.get(graph.place(eqn))) is None:
                    return jaxprs.bind(eqn, [*map(_rows, values)])
                outs = loop.run([operand(loop, i, x) for i, x in enumerate(values)], schedule)
            return [
                Slots(out, loop.results[i].dim, schedule) if loop.stores(i) else out
                for i, out in enumerate(outs)
            ]

        return [*map(_rows, jaxprs.interpret(flat, env, run))]


def _rows(x: Value) -> Value:
    return x.rows if isinstance(x, Slots) else x


def _stacks_of(eqn: Equation, layers: Sequence[int | None]) -> list[int]:
    """Returns the layers, of those of its operands, over which a scan loops that carries rows; none
    for other equations."""
    if (scan := jaxprs.scan_parts(eqn)) is None:
        return []
    (_, carry, _), (_, _, stacks) = scan.operands(eqn.invars), scan.operands(layers)
    return [i for i in stacks if i is not None] if any(map(growing, carry)) else []


def _as_program(eqn: Equation) -> Flat:
    """Returns a program of one equation, with variables in place of its literals."""
    given: list[Atom] = [jaxprs.new_variable(v.aval) for v in eqn.invars]
    return Flat(given, [eqn.replace(invars=given)], [*eqn.outvars])
