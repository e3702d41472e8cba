"""1F1B: forward and backward passes of different micro-batches share the ticks of one loop.

With S stages and M micro-batches, stage s runs the layers of micro-batch i forward in tick i + s,
and backward in tick i + 2 (S - 1) - s: S - 1 ticks of forward passes, M ticks of both, S - 1 ticks
of backward passes (Narayanan et al., 2021, arXiv:2104.04473, in lockstep). The stages idle for as
long as with GPipe, but a stage keeps what the backward pass needs of at most 2 S - 1 micro-batches.

The equations between both passes of a micro-batch (:mod:`zerojax.pipeline.middle`) run on all
stages in each of the M ticks, and only the last stage's results count: the other stages would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import PartitionSpec

from zerojax.accumulation.flat import Flat
from zerojax.accumulation.reductions import REDUCTIONS
from zerojax.devices.mesh import STAGE
from zerojax.pipeline import layer, slots
from zerojax.pipeline.loop import LayerLoop, Stage, State, entry
from zerojax.pipeline.middle import Middle, reached_from
from zerojax.pipeline.schedule import Schedule
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom

Values = dict[int, jax.Array]
"""Arrays by position: of a loop's operand, or among the crossing values."""


class OneForwardOneBackward(NamedTuple):
    """Both loops over the layers of a step, and the equations between them.

    Attributes:
      forward, backward: The loops.
      middle: The equations between them.
      dtypes: By crossing variable, the dtype in which it is added up.
    """

    forward: LayerLoop
    backward: LayerLoop
    middle: Middle
    dtypes: Mapping[Atom, Any]

    def late(self, flat: Flat) -> tuple[set[int], list[int]]:
        """Returns the positions of the equations that depend on the layers, and of those of them
        that run afterwards, on the global batch."""
        loops = {id(loop.global_equation) for loop in (self.forward, self.backward)}
        done = loops | {id(pair.global_eqn) for pair in self.middle.equations}
        reached = reached_from(flat.eqns, self.forward.global_equation.outvars)
        late = [
            i
            for i, eqn in enumerate(flat.eqns)
            if id(eqn) in loops or not reached.isdisjoint(jaxprs.variables(eqn.invars))
        ]
        return {*late}, [i for i in late if id(flat.eqns[i]) not in done]

    def run(
        self,
        operand: Callable[[LayerLoop, int], jax.Array],
        read: Callable[[Atom], jax.Array],
        schedule: Schedule,
    ) -> dict[Atom, jax.Array]:
        """Runs the loops.

        Args:
          operand: Returns an operand of a loop on the global batch.
          read: Returns the value of a variable on the global batch.

        Returns:
          The values of the variables that later equations use, on the global batch.
        """
        program = _Program(self, schedule)
        places: dict[tuple[int, PartitionSpec], int] = {}
        given: list[jax.Array] = []

        def put(x: jax.Array, spec: PartitionSpec) -> int:
            key = id(x), spec
            if key not in places:
                places[key] = len(given)
                given.append(x)
            return places[key]

        forward, backward = program.forward, program.backward
        layout = _Layout(
            {
                j: put(operand(self.forward, j), forward.operand_spec(j))
                for j in range(len(self.forward.operands))
            },
            {
                j: put(operand(self.backward, j), backward.operand_spec(j))
                for j in range(len(self.backward.operands))
                if j not in program.inputs
            },
            {
                j: put(read(v), forward.streams.spec(program.dims[j]))
                for j, v in program.sent_along.items()
            },
            {v: put(read(v), PartitionSpec()) for v in self.middle.fixed},
        )
        axes = schedule.axes
        specs = [spec for _, spec in places]
        crossing_specs = [
            PartitionSpec(axes)
            if kind.reduced
            else PartitionSpec(STAGE, *slots.slots_spec(schedule, kind.dim + 2, 0)[1:])
            for kind in self.middle.crossing.values()
        ]
        kept = [(program.forward, j) for j in program.returned]
        kept += [(program.backward, j) for j in range(len(self.backward.results))]
        outs = jax.shard_map(
            lambda *values: program(layout, values),
            mesh=schedule.mesh,
            in_specs=tuple(specs),
            out_specs=[*(stage.result_spec(j) for stage, j in kept), *crossing_specs],
            axis_names={*axes},
            check_vma=False,
        )(*given)
        found = {
            stage.loop.global_equation.outvars[j]: stage.leaving(j, x)
            for (stage, j), x in zip(kept, outs, strict=False)
        }
        crossing = zip(self.middle.crossing.items(), outs[len(kept) :], strict=True)
        for (v, kind), x in crossing:
            found[v] = (
                REDUCTIONS[kind.name].over(x, (0,))
                if kind.reduced
                else slots.from_slots(x[-1], kind.dim, schedule)
            )
        return found


class _Layout(NamedTuple):
    """The places of values among a device's arguments.

    Attributes:
      forward, backward: By position of an operand.
      sent_along: By key of :attr:`_Program.sent_along`.
      fixed: By variable without rows.
    """

    forward: Mapping[int, int]
    backward: Mapping[int, int]
    sent_along: Mapping[int, int]
    fixed: Mapping[Atom, int]


class _State(NamedTuple):
    """The carry of the loops over ticks.

    Attributes:
      forward, backward: Those of the layers.
      crossing: Sums over rows so far, and rows of all micro-batches.
    """

    forward: State
    backward: State
    crossing: list[jax.Array]


class _Program:
    """The program of one device.

    Attributes:
      forward, backward: Its layers.
      sent_along: Variables with rows that a micro-batch brings along beside the forward pass's
        operands; their keys follow the positions of these operands.
      dims: The dimension of the rows, by position or key.
      inputs: Positions of the backward pass's operands that the forward pass, the middle or
        ``sent_along`` provide.
      returned: Positions of the forward pass's results that are returned.
    """

    def __init__(self, plan: OneForwardOneBackward, schedule: Schedule) -> None:
        self.plan, self.schedule = plan, schedule
        self.forward, self.backward = (Stage(x, schedule) for x in (plan.forward, plan.backward))
        one, other = plan.forward.global_equation, plan.backward.global_equation
        self._from_forward = {v: j for j, v in enumerate(one.outvars)}
        rows = {v: kind.dim for v, kind in plan.middle.entering.items()}
        results = {v for pair in plan.middle.equations for v in pair.global_eqn.outvars}
        self.inputs = set[int]()
        for j, (v, kind) in enumerate(zip(other.invars, plan.backward.operands, strict=True)):
            known = not isinstance(v, core.Literal)
            if known and (kind.rows or v in self._from_forward or v in results):
                self.inputs.add(j)
                if v not in self._from_forward and v not in results:
                    rows[v] = kind.dim
        for v in jaxprs.variables(one.invars[j] for j in self.forward.moving):
            rows.pop(v, None)
        self.sent_along = dict(enumerate(rows, len(one.invars)))
        self.dims = {j: kind.dim for j, kind in enumerate(plan.forward.operands) if kind.rows}
        self.dims |= {j: rows[v] for j, v in self.sent_along.items()}
        self._micro_avals = dict(
            zip(one.outvars, [m.aval for m in plan.forward.equation.outvars], strict=True)
        )
        for pair in plan.middle.equations:
            outs = zip(pair.global_eqn.outvars, pair.micro_eqn.outvars, strict=True)
            self._micro_avals |= {v: m.aval for v, m in outs}
        self.returned = [j for j, kind in enumerate(plan.forward.results) if not kind.rows]

    def __call__(self, layout: _Layout, values: tuple[jax.Array, ...]) -> list[jax.Array]:
        schedule, plan = self.schedule, self.plan
        self._given = {j: values[at] for j, at in layout.forward.items()}
        self._given_back = {j: values[at] for j, at in layout.backward.items()}
        self._fixed = {v: values[at] for v, at in layout.fixed.items()}
        self._place = lax.axis_index(STAGE)
        forward = self.forward
        entering = {j: x for j, x in self._given.items() if j in forward.moving and j in self.dims}
        entering |= {j: values[at] for j, at in layout.sent_along.items()}
        streams = {j: forward.streams.open(x, self.dims[j]) for j, x in entering.items()}
        arriving = {j: jnp.zeros_like(self._given[j]) for j in forward.moving if j not in streams}
        arriving |= {key: jnp.zeros_like(x[0]) for key, x in streams.items()}
        back: Values = {}
        for j in self.backward.moving:
            v = plan.backward.equation.invars[j]
            back[j] = jnp.zeros(v.aval.shape, v.aval.dtype)
        leaving = {
            j: jnp.zeros((schedule.slots, *back[j].shape), back[j].dtype)
            for j, kind in zip(self.backward.carry, plan.backward.results, strict=False)
            if kind.rows
        }
        state = _State(
            State(arriving, streams, forward.empty()),
            State(back, leaving, self.backward.empty()),
            [self._empty(v) for v in plan.middle.crossing],
        )
        n, m = schedule.stages - 1, schedule.micro_batches
        for tick, start, ticks in (
            (self._warm_up, 0, n),
            (self._steady, n, m),
            (self._cool_down, n + m, n),
        ):
            state, _ = lax.scan(tick, state, jnp.arange(start, start + ticks))
        crossing = zip(plan.middle.crossing, state.crossing, strict=True)
        return [
            *(forward.result(j, state.forward) for j in self.returned),
            *(self.backward.result(j, state.backward) for j in range(len(plan.backward.results))),
            *(self._crossed(v, x)[None] for v, x in crossing),
        ]

    def _warm_up(self, state: _State, t: jax.Array) -> tuple[_State, None]:
        forward, _ = self._forward(state.forward, t)
        return state._replace(forward=forward), None

    def _steady(self, state: _State, t: jax.Array) -> tuple[_State, None]:
        forward, env = self._forward(state.forward, t)
        rows, busy = self._rows(t - self._place)
        layer.run_equations(self.plan.middle.equations, env, rows)
        counts = busy & (self._place == self.schedule.stages - 1)
        micro_batch = jnp.where(counts, t - self._place, self.schedule.micro_batches)
        crossing = []
        both = zip(self.plan.middle.crossing.items(), state.crossing, strict=True)
        for (v, kind), old in both:
            if kind.reduced:
                new = REDUCTIONS[kind.name].of_two(old, env[v].astype(old.dtype))
                crossing.append(jnp.where(counts, new, old))
            else:
                crossing.append(lax.dynamic_update_index_in_dim(old, env[v], micro_batch, 0))
        backward = self._backward(state.backward, t, env, forward.results)
        return _State(forward, backward, crossing), None

    def _cool_down(self, state: _State, t: jax.Array) -> tuple[_State, None]:
        backward = self._backward(state.backward, t, None, state.forward.results)
        return state._replace(backward=backward), None

    def _rows(self, micro_batch: jax.Array) -> tuple[layer.Rows, jax.Array]:
        """Returns the rows of a micro-batch, and whether the micro-batch exists."""
        m, number = self.schedule.micro_batches, self.plan.forward.rows
        busy = (micro_batch >= 0) & (micro_batch < m)
        first = self.forward.streams.first_row(jnp.clip(micro_batch, 0, m - 1), number)
        return layer.Rows(first, number, self.schedule.axes), busy

    def _slot(self, micro_batch: jax.Array) -> jax.Array:
        """Returns the slot for what a stage keeps of a micro-batch; for one that does not exist, a
        slot that no other needs at the time."""
        return jnp.clip(micro_batch, -1, self.schedule.micro_batches) % self.schedule.kept_slots

    def _forward(self, state: State, t: jax.Array) -> tuple[State, dict[Atom, Any]]:
        """Runs the layers forward; returns the values of the micro-batch after them, too."""
        stage, micro_batch = self.forward, t - self._place
        eqn = self.plan.forward.global_equation
        rows, busy = self._rows(micro_batch)
        slot, first = t % self.schedule.slots, self._place == 0
        streams = {key: entry(x, slot) for key, x in state.streams.items()}
        here = {
            key: jnp.where(first, streams[key] if key in streams else self._given[key], x)
            for key, x in state.arriving.items()
        }
        given = [here.get(j, x) for j, x in self._given.items()]
        kept = (self._slot(micro_batch),) * 2
        with jaxprs.named_as(eqn):
            outs, results = stage.run_layers(given, state.results, rows, busy, kept)
        last = self._place == self.schedule.stages - 1
        for j in range(stage.n):
            if j in results:
                results[j] = stage.next_sum(j, state.results[j], outs[j], busy & last)
        env: dict[Atom, Any] = {v: here[j] for j, v in self.sent_along.items()}
        variables = ((eqn.invars[j], here[j]) for j in stage.moving)
        env |= {v: x for v, x in variables if not isinstance(v, core.Literal)}
        env |= self._fixed | dict(zip(eqn.outvars, outs, strict=False))
        leaving = here | dict(zip(stage.carry, outs, strict=True))
        streams = {
            key: lax.dynamic_update_index_in_dim(state.streams[key], stage.sent(x, -1), slot, 0)
            for key, x in streams.items()
        }
        return State({k: stage.sent(x, 1) for k, x in leaving.items()}, streams, results), env

    def _backward(
        self,
        state: State,
        t: jax.Array,
        env: Mapping[Atom, Any] | None,
        forward: Mapping[int, jax.Array],
    ) -> State:
        """Runs the layers backward.

        Args:
          env: The values of the micro-batch that enters at the last stage; None if none enters.
          forward: What the forward pass has kept.
        """
        stage, stages = self.backward, self.schedule.stages
        eqn = self.plan.backward.global_equation
        micro_batch = t - 2 * (stages - 1) + self._place
        rows, busy = self._rows(micro_batch)
        given = []
        for j, v in enumerate(eqn.invars):
            if j not in stage.moving:
                at_forward = None if j not in self.inputs else self._from_forward[v]
                given.append(self._given_back[j] if at_forward is None else forward[at_forward])
            elif env is None:
                given.append(state.arriving[j])
            else:
                enters = env[v] if j in self.inputs else self._given_back[j]
                given.append(jnp.where(self._place == stages - 1, enters, state.arriving[j]))
        kept = (self._slot(micro_batch),) * 2
        with jaxprs.named_as(eqn):
            outs, results = stage.run_layers(given, state.results, rows, busy, kept)
        last = self._place == 0
        for j in range(stage.n):
            if j in results:
                results[j] = stage.next_sum(j, state.results[j], outs[j], busy & last)
        sent = {j: given[j] for j in stage.moving} | dict(zip(stage.carry, outs, strict=True))
        # A slot's content goes round, from the first stage to the last, and on to the stage that
        # has the micro-batch's rows.
        slot = (t - stages + 1) % self.schedule.slots
        streams = {}
        for j, x in state.streams.items():
            leaving = stage.sent(jnp.where(last, sent[j], entry(x, slot)), 1)
            streams[j] = lax.dynamic_update_index_in_dim(x, leaving, slot, 0)
        return State({j: stage.sent(x, 1) for j, x in sent.items()}, streams, results)

    def _empty(self, v: Atom) -> jax.Array:
        """Returns a crossing value before the first tick."""
        kind, micro = self.plan.middle.crossing[v], self._micro_avals[v]
        if kind.reduced:
            dtype = self.plan.dtypes[v]
            return jnp.full(micro.shape, REDUCTIONS[kind.name].neutral(dtype), dtype)
        return jnp.zeros((self.schedule.micro_batches + 1, *micro.shape), micro.dtype)

    def _crossed(self, v: Atom, x: jax.Array) -> jax.Array:
        if self.plan.middle.crossing[v].reduced:
            return x.astype(v.aval.dtype)
        return x[:-1]
