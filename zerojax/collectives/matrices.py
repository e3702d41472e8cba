"""Optimizers that compute with matrices: each device computes with some of the matrices.

ZeRO shards every matrix over the devices, and Muon's Newton-Schulz iteration reads it in full.
Gathered, each matrix would be computed with on every device. Instead, equal calls of
:func:`zerojax.optim.over_matrices.over_matrices` run on one stack of their matrices, of which each
device has some: an all-to-all brings the matrices there, another one the results to the shards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, PartitionSpec

from zerojax.collectives import propagate
from zerojax.collectives.decisions import UPDATE
from zerojax.collectives.gathering import Gatherer
from zerojax.distributed import log
from zerojax.graph.analysis import Analysis
from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE, FACTORIZATIONS, PRODUCTS
from zerojax.graph.search import contains, everything, holds
from zerojax.optim.over_matrices import is_call, program_for_one, run_call
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.state_sharding import Plan
from zerojax.plan.stored import pad
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, Value


class MatrixUpdate:
    """Runs an optimizer's update on shards.

    Equal calls of :func:`zerojax.optim.over_matrices.over_matrices` run on a stack, of which each
    device has some matrices; the other equations run as they are. If K matrices do not divide among
    N devices, the stack is filled with copies of its first ones, so that each device computes with
    K / N matrices, rounded up. Matrices that no axis shards, and stacks that are sharded along
    their matrices, stay where they are.

    The branches of a ``cond`` that updates several parameters (``optax.MultiSteps``,
    ``optax.apply_if_finite``) are updates themselves.

    Args:
      gatherer: Records the collectives; has the devices.
      shapes, specs: The shapes and the specs of the update's arguments, flat; None for an unknown
        spec.
      advises: Whether to advise, once, of products of sharded matrices outside of calls.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shapes: Sequence[tuple[int, ...]],
        specs: Sequence[Spec | None],
        *,
        advises: bool = True,
    ) -> None:
        self._gatherer, self._shapes, self._specs = gatherer, shapes, specs
        self._advises = advises

    @classmethod
    def of(cls, gatherer: Gatherer, plan: Plan, opt_state: Sequence[Leaf]) -> MatrixUpdate:
        """Returns the update of all parameters of a plan.

        Args:
          gatherer: Records the collectives.
          plan: The plan.
          opt_state: The leaves of the optimizer's own state, without zerojax's.
        """
        params = plan.leaves["params"]
        leaves = [*params, *opt_state, *params]
        grads = jax.tree.leaves(plan.grads, is_leaf=lambda x: isinstance(x, PartitionSpec))
        specs = [*grads, *(leaf.spec for leaf in leaves[len(params) :])]
        shapes = [leaf.shape for leaf in leaves]
        full = [layout.full(spec, len(shape)) for spec, shape in zip(specs, shapes, strict=True)]
        return cls(gatherer, shapes, full)

    def suits(self, closed: AnyJaxpr) -> bool:
        """Returns whether an update, a closed jaxpr, computes with matrices."""
        return holds(jaxprs.open_jaxpr(closed)[0], is_of_matrices, everything)

    def __call__(self, closed: AnyJaxpr, args: Sequence[jax.Array]) -> list[Any]:
        """Returns the results of the update, a closed jaxpr."""
        given = self._specs if [x.shape for x in args] == self._shapes else [None] * len(args)
        return self._program(closed, args, given)

    def _program(
        self, closed: AnyJaxpr, args: Sequence[jax.Array], given: Sequence[Spec | None]
    ) -> list[Any]:
        """Runs an update, or a branch of one, on arguments with known or unknown specs."""
        if not self.suits(closed):
            return jaxprs.evaluate(closed, args, opens=lambda eqn: False)
        jaxpr, consts = jaxprs.open_jaxpr(jaxprs.without_calls(closed, _opens))
        specs = known_specs(jaxpr, given, self._gatherer.mesh)
        self._advises = self._advises and not advise(jaxpr, specs)
        groups = graph_of(jaxpr).groups(lambda eqn: _call_key(eqn, specs))
        calls = {group[0].outvars[0]: group for group in groups if is_call(group[0])}
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def run(eqn: Equation, values: Sequence[Value]) -> Sequence[Value]:
            if not is_call(eqn):
                return self._equation(eqn, values, specs)
            (out,) = eqn.outvars
            if out in calls:  # the first of its group
                env.update(self._run(calls[out], env, specs.get(eqn.invars[-1])))
            return [env[out]]

        ordered = jaxpr.replace(eqns=[*itertools.chain.from_iterable(groups)])
        return jaxprs.interpret(ordered, env, run)

    def _equation(
        self, eqn: Equation, values: Sequence[Value], specs: Mapping[Atom, Spec]
    ) -> Sequence[Value]:
        """Runs an equation that is not a call."""
        if not (eqn.primitive is prims.cond_p and contains(eqn, is_call)):
            with jaxprs.traced_where(eqn):
                return jaxprs.bind(eqn, values)
        given = [None if isinstance(v, core.Literal) else specs.get(v) for v in eqn.invars[1:]]
        which, *operands = values
        operands = [
            x if spec is None else marks.mark(x, marks.SHARD)
            for x, spec in zip(operands, given, strict=True)
        ]

        def branch(jaxpr: AnyJaxpr) -> Callable[..., list[jax.Array]]:
            def run(*args: jax.Array) -> list[jax.Array]:
                outs = zip(self._program(jaxpr, args, given), eqn.outvars, strict=True)
                return [jnp.asarray(x, v.aval.dtype) for x, v in outs]  # it may be a literal

            return run

        branches = [branch(jaxpr) for jaxpr in jaxprs.param(eqn, "branches")]
        with jaxprs.context(eqn):
            outs: list[jax.Array] = lax.switch(which, branches, *operands)
        return outs

    def _run(
        self, calls: Sequence[Equation], env: Mapping[Atom, Value], spec: Spec | None
    ) -> dict[Atom, jax.Array]:
        """Runs equal calls on one stack [count, m, n]; returns their results.

        Args:
          calls: The calls.
          env: The values.
          spec: The spec of each stack; None if it is unknown.
        """
        shared = [jaxprs.read(v, env) for v in calls[0].invars[:-1]]
        stacks = [marks.mark(env[call.invars[-1]], marks.SHARD) for call in calls]
        results = [call.outvars[0] for call in calls]
        steps = self._exchanges(spec)
        if not steps:
            outs = [run_call(calls[0], shared, x) for x in stacks]
            return dict(zip(results, outs, strict=True))
        mesh, shape = self._gatherer.mesh, stacks[0].shape[1:]
        padded = layout.padded_shape((1, *shape), steps[0], mesh)[1:]
        x = jnp.concatenate(stacks)
        count, devices = len(x), layout.parts(steps[-1][0], mesh)
        total = -(-count // devices) * devices
        copies = -(-total // count)
        x = jnp.concatenate([x] * copies)[:total] if copies > 1 else x
        whole = self._sent(pad(x, (total, *padded)), steps)[:, : shape[0], : shape[1]]
        out = pad(run_call(calls[0], shared, whole), (total, *padded))
        back = self._sent(out, steps[::-1])[:count, : shape[0], : shape[1]]
        ends = np.cumsum([len(x) for x in stacks])[:-1].tolist()
        return dict(zip(results, jnp.split(back, ends), strict=True))

    def _exchanges(self, spec: Spec | None) -> list[Spec]:
        """Returns the specs of a stack on its way from shards of all matrices to some matrices in
        full, of which each is one all-to-all after the one before; none if nothing is exchanged, or
        if the context has another mesh (``jax.set_mesh``, ``jax.shard_map``)."""
        if spec is None or spec[0] is not None:
            return []
        steps = [spec]
        for d in (1, 2):
            if names := layout.axes(spec[d]):
                first, *others = spec
                others[d - 1] = None
                spec = ((*layout.axes(first), *names), *others)
                steps.append(spec)
        context = jax.sharding.get_abstract_mesh()
        mesh = layout.sharding(self._gatherer.mesh, spec).mesh
        is_other = not context.empty and context != mesh.abstract_mesh
        return [] if len(steps) == 1 or is_other else steps

    def _sent(self, x: jax.Array, steps: Sequence[Spec]) -> jax.Array:
        """Constrains a stack to one spec after another."""
        gatherer = self._gatherer
        # Otherwise XLA moves the cast of the momentum past the all-to-all: 11.0 MB for 7.3 of Muon
        # on three 1024 x 1024 matrices.
        x = gatherer.constrain_always(x, steps[0])
        for before, spec in itertools.pairwise(steps):
            moved = {*layout.axes(before[0])} ^ {*layout.axes(spec[0])}
            devices = layout.parts(tuple(moved), gatherer.mesh)
            with gatherer.ledger.place(UPDATE, "each device computes with some of the matrices"):
                gatherer.ledger.exchanges(x, before, devices)
            x = gatherer.constrain_always(x, spec)
        return x


def with_matrices(closed: AnyJaxpr, specs: Sequence[Spec | None], gatherer: Gatherer) -> AnyJaxpr:
    """Returns a traced step, which updates its state itself, with the matrices of its update
    distributed over the devices. The updates of an optimizer that zerojax wraps are distributed
    when they are traced.

    Args:
      closed: The step's jaxpr.
      specs: The specs of its arguments; None for an unknown spec.
      gatherer: Records the collectives; has the devices.
    """
    jaxpr, _ = jaxprs.open_jaxpr(closed)
    if not holds(jaxpr, is_call, everything):
        return closed
    shapes = [v.aval.shape for v in jaxpr.invars]
    run = MatrixUpdate(gatherer, shapes, specs, advises=False)
    arguments = map(jaxprs.like, (v.aval for v in jaxpr.invars))
    return jax.make_jaxpr(lambda *args: run(closed, args))(*arguments)


def _opens(eqn: Equation) -> bool:
    """Returns whether a call is inlined: not one of matrices, nor one of the model."""
    return not is_call(eqn) and not contains(eqn, jaxprs.is_differentiated)


def computes_with_matrices(eqn: Equation) -> bool:
    """Returns whether an equation multiplies or factorizes matrices."""
    name = eqn.primitive.name
    return (name in PRODUCTS and eqn.outvars[0].aval.ndim > 1) or name in FACTORIZATIONS


def is_of_matrices(eqn: Equation) -> bool:
    """Returns whether an equation computes with matrices, or is a call of ``over_matrices``."""
    return is_call(eqn) or computes_with_matrices(eqn)


def advise(jaxpr: Jaxpr, specs: Mapping[Atom, Spec]) -> bool:
    """Advises of products and factorizations of sharded matrices outside of calls; returns whether
    there are any.

    Args:
      jaxpr: The program of an update.
      specs: The known specs of its values.
    """
    products = graph_of(jaxpr).where(
        lambda eqn: not contains(eqn, is_call) and contains(eqn, computes_with_matrices)
    )
    operands = [v for v in jaxprs.operands(products) if v.aval.ndim > 1 and any(specs.get(v, ()))]
    shapes = dict.fromkeys(v.aval.shape for v in operands)
    if shapes:
        log.warning(
            "the optimizer computes with matrices, and XLA gathers arrays of shapes %s on each "
            "device: apply the arithmetic of a matrix by zerojax.over_matrices, so that each "
            "device computes with some of them (docs/precision.md).",
            ", ".join(map(str, shapes)),
        )
    return bool(shapes)


def known_specs(jaxpr: Jaxpr, given: Sequence[Spec | None], mesh: Mesh) -> dict[Atom, Spec]:
    """Returns the specs of the values that are computed element by element from arguments.

    Args:
      jaxpr: An open jaxpr without calls but those of ``over_matrices``.
      given: The specs of its arguments; None for an unknown spec.
      mesh: The devices.
    """

    def forward(eqn: Equation, operands: Sequence[Spec | None]) -> list[Spec | None]:
        pairs = zip(eqn.invars, operands, strict=True)
        known = [(v.aval.shape, spec) for v, spec in pairs if spec is not None]
        spec: Spec | None = None
        if eqn.primitive.name in ELEMENTWISE or is_call(eqn):
            # XLA computes with the operand that is sharded over more devices.
            spec = max(
                (spec for shape, spec in known if shape == eqn.outvars[0].aval.shape),
                key=lambda spec: math.prod(layout.parts(entry, mesh) for entry in spec),
                default=None,
            )
        elif known and propagate.moves(eqn.primitive.name):
            spec = propagate.forward(eqn, known[0][1], mesh)
        return [spec if i == 0 else None for i in range(len(eqn.outvars))]

    analysis: Analysis[Spec | None] = Analysis(None, lambda a, b: a, forward, enters=False)
    return {v: x for v, x in analysis.forward(jaxpr, given).of.items() if x is not None}


def _call_key(eqn: Equation, specs: Mapping[Atom, Spec]) -> object:
    """Returns an object that is equal for calls that run one program, read the same values and have
    equal specs; None for other equations."""
    if not is_call(eqn):
        return None
    *shared, stack = eqn.invars
    program = str(program_for_one(eqn))
    return program, _constants(eqn), tuple(map(_same, shared)), specs.get(stack)


def _same(v: Atom) -> object:
    return str(v) if isinstance(v, core.Literal) else v


def _constants(call: Equation) -> tuple[bytes, ...]:
    """Returns the values of a call's constant arrays, which the text of its program leaves out."""
    _, consts = jaxprs.open_jaxpr(jaxprs.called_jaxpr(call))
    return tuple(np.asarray(x).tobytes() for x in consts)
