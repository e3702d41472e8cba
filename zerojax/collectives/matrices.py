"""Optimizers that compute with matrices: each device computes with some of the matrices.

ZeRO shards every matrix over the devices, and Muon's Newton-Schulz iteration reads it in full.
Gathered, each matrix would be computed with on every device. Instead, each device computes with
some of the matrices of :func:`zerojax.optim.over_matrices.over_matrices`: an all-to-all brings them
there, another one the results to the shards.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from zerojax.plan.stored import pad, unpad
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, Value


class MatrixUpdate:
    """Runs an optimizer's update on shards.

    Equal calls of :func:`zerojax.optim.over_matrices.over_matrices` run on a stack, of which each
    device has some matrices; the other equations run as they are. Matrices that do not divide among
    the devices are sent together, each to another device, which runs the program of that matrix.
    Matrices that no axis shards, and stacks that are sharded along their matrices, stay where they
    are.

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
        groups = graph_of(jaxpr).groups(lambda eqn: self._exchange_key(eqn, specs))
        calls = {group[0].outvars[0]: group for group in groups if is_call(group[0])}
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def run(eqn: Equation, values: Sequence[Value]) -> Sequence[Value]:
            if not is_call(eqn):
                return self._equation(eqn, values, specs)
            if self._exchange_key(eqn, specs) is None:
                *shared, stack = values
                return [run_call(eqn, shared, marks.mark(stack, marks.SHARD))]
            (out,) = eqn.outvars
            if out in calls:  # the first of its group
                env.update(self._run(calls[out], env, specs))
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

    def _axes(self, spec: Spec | None) -> tuple[str, ...]:
        """Returns the axes over which matrices of a spec are exchanged, in the order of
        :meth:`Stack.cut`; none if they stay where they are, or if the context has another mesh
        (``jax.set_mesh``, ``jax.shard_map``)."""
        if spec is None or spec[0] is not None:
            return ()
        axes = tuple(sorted((name for entry in spec for name in layout.axes(entry)), key=_place))
        # Together all parts of an axis are the axis, whatever the dimensions that they shard.
        full = tuple(dict.fromkeys(map(layout.full_axis, axes)))
        if layout.parts(full, self._gatherer.mesh) == layout.parts(axes, self._gatherer.mesh):
            axes = full
        context = jax.sharding.get_abstract_mesh()
        mesh = layout.sharding(self._gatherer.mesh, (axes,)).mesh
        return axes if context.empty or context == mesh.abstract_mesh else ()

    def _exchange_key(self, eqn: Equation, specs: Mapping[Atom, Spec]) -> object:
        """Returns an object that is equal for calls whose matrices may be sent together; None for
        calls whose matrices stay, and for other equations."""
        if not is_call(eqn) or not (axes := self._axes(specs.get(eqn.invars[-1]))):
            return None
        return axes, eqn.invars[-1].aval.dtype, eqn.outvars[0].aval.dtype

    def _run(
        self, calls: Sequence[Equation], env: Mapping[Atom, Value], specs: Mapping[Atom, Spec]
    ) -> dict[Atom, jax.Array]:
        """Runs calls whose matrices may be sent together; returns their results.

        Args:
          calls: The calls.
          env: The values.
          specs: The known specs.
        """
        equal: dict[object, list[Equation]] = {}
        for call in calls:
            equal.setdefault(_call_key(call, specs), []).append(call)
        mesh = self._gatherer.mesh
        stacks = [Stack.of(each, env, specs[each[0].invars[-1]], mesh) for each in equal.values()]
        sizes = [(len(each.x), math.prod(each.x.shape[1:])) for each in stacks]
        found: list[list[jax.Array]] = [[] for _ in stacks]
        for exchange in exchanges(sizes, stacks[0].devices):
            sent = [stacks[i]._replace(x=stacks[i].x[k[0] : k[-1] + 1]) for i, k in exchange]
            for (i, _), out in zip(exchange, self._exchanged(sent), strict=True):
                found[i].append(out)
        results: dict[Atom, jax.Array] = {}
        for each, outs in zip(equal.values(), found, strict=True):
            ends = np.cumsum([len(env[call.invars[-1]]) for call in each])[:-1].tolist()
            of_calls = jnp.split(jnp.concatenate(outs), ends)
            results |= zip((call.outvars[0] for call in each), of_calls, strict=True)
        return results

    def _exchanged(self, stacks: Sequence[Stack]) -> list[jax.Array]:
        """Returns the results of the matrices of one exchange, see :func:`exchanges`."""
        gatherer, devices, axes = self._gatherer, stacks[0].devices, self._axes(stacks[0].spec)
        at_rest, sent = (axes, None, None), (None, axes, None)
        shards = []
        for each in stacks:
            # Otherwise XLA moves the cast of the momentum past the all-to-all: 11.0 MB for 7.3 of
            # Muon on three 1024 x 1024 matrices.
            x = each.cut(gatherer.constrain_always(each.x, each.spec), min(len(each.x), devices))
            shards.append(gatherer.constrain_always(x, at_rest))
        sizes = [x.shape[2] for x in shards]
        copies = copies_of([(x.shape[1], x.shape[2]) for x in shards], devices)
        parts = [-(-size // n) for size, n in zip(sizes, copies, strict=True)]
        table = [(i, k % n) for i, n in enumerate(copies) for k in range(n * shards[i].shape[1])]
        copied = [
            _wide(jnp.repeat(x, n, 1), max(sizes)) for x, n in zip(shards, copies, strict=True)
        ]
        # A device without a matrix computes with the last one too.
        copied += [copied[-1][:, -1:]] * (devices - len(table))
        table += table[-1:] * (devices - len(table))

        def compute(x: jax.Array, row: jax.Array, shared: Sequence[Sequence[Value]]) -> jax.Array:
            def of_stack(i: int, x: jax.Array) -> jax.Array:
                each, n = stacks[i], copies[i]
                y = run_call(each.call, shared[i], each.joined(x[:, :, : sizes[i]]))
                y = _wide(each.cut(y), n * parts[i]).reshape(devices, n, -1)
                return _wide(lax.dynamic_index_in_dim(y, row[0, 1], 1), max(parts))

            branches = [functools.partial(of_stack, i) for i in range(len(stacks))]
            return lax.switch(row[0, 0], branches, x)  # type: ignore[no-any-return]

        placed = layout.sharding(gatherer.mesh, sent)
        args = placed.spec, PartitionSpec(placed.spec[1]), PartitionSpec()
        computed = jax.shard_map(
            compute, mesh=placed.mesh, in_specs=args, out_specs=placed.spec, check_vma=False
        )
        there = self._sent(jnp.concatenate(copied, 1), at_rest, sent)
        out = computed(there, jnp.array(table, jnp.int32), [each.shared for each in stacks])
        back, results = self._sent(out, sent, at_rest), []
        for each, x, n, part in zip(stacks, shards, copies, parts, strict=True):
            own, back = jnp.split(back, [x.shape[1] * n], 1)
            own = own[:, :, :part].reshape(*x.shape[:2], -1)[:, :, : x.shape[2]]
            results.append(gatherer.constrain_always(each.joined(own), each.spec))
        return results

    def _sent(self, x: jax.Array, before: Spec, after: Spec) -> jax.Array:
        """Sends an array [devices, devices, size] by an all-to-all."""
        x = self._gatherer.constrain_always(x, before)
        with self._gatherer.ledger.place(UPDATE, "each device computes with some of the matrices"):
            self._gatherer.ledger.exchanges(x, before, len(x))
        return self._gatherer.constrain_always(x, after)


class Stack(NamedTuple):
    """Sharded matrices of equal calls.

    Attributes:
      call: One of the calls.
      shared: The values that the function reads beside its matrix.
      x: The matrices [count, m, n], padded to equal shards.
      spec: Their spec.
      devices: The number of shards of a matrix.
      sizes: Those of the dimensions [count, axes of the rows, rows of a shard, axes of the columns,
        columns of a shard].
      order: These dimensions in the order of :meth:`cut`.
    """

    call: Equation
    shared: Sequence[Value]
    x: jax.Array
    spec: Spec
    devices: int
    sizes: Sequence[int]
    order: Sequence[int]

    @classmethod
    def of(
        cls, calls: Sequence[Equation], env: Mapping[Atom, Value], spec: Spec, mesh: Mesh
    ) -> Stack:
        """Returns the stack of equal calls, whose operands ``env`` has."""
        x = jnp.concatenate([marks.mark(env[call.invars[-1]], marks.SHARD) for call in calls])
        x = pad(x, layout.padded_shape(x.shape, spec, mesh))
        shared = [jaxprs.read(v, env) for v in calls[0].invars[:-1]]
        named = ["", *layout.axes(spec[1]), "", *layout.axes(spec[2]), ""]
        slices = {axis: layout.parts(axis, mesh) for axis in filter(None, named)}
        others = iter((-1, *layout.shard_shape(x.shape, spec, mesh)[1:]))
        sizes = [slices[axis] if axis else next(others) for axis in named]
        # First the axes, in the same order for all stacks.
        order = sorted(range(len(named)), key=lambda d: (not named[d], _place(named[d])))
        return cls(calls[0], shared, x, spec, math.prod(slices.values()), sizes, order)

    def cut(self, x: jax.Array, held: int = 1) -> jax.Array:
        """Cuts matrices [..., m, n] with which ``held`` devices compute into shards
        [devices, held, size]."""
        x = pad(x, (len(x), *self.x.shape[1:])).reshape(self.sizes).transpose(self.order)
        return x.reshape(self.devices, held, -1)

    def joined(self, shards: jax.Array) -> jax.Array:
        """Joins shards [devices, held, size] to matrices [..., m, n], without padding."""
        x = shards.reshape([self.sizes[d] for d in self.order]).transpose(np.argsort(self.order))
        x = x.reshape(-1, *self.x.shape[1:])
        return unpad(x, (len(x), *self.call.invars[-1].aval.shape[1:]))


def exchanges(
    stacks: Sequence[tuple[int, int]], devices: int
) -> list[list[tuple[int, Sequence[int]]]]:
    """Returns the exchanges that bring matrices to devices: the stacks in each, with the numbers of
    some of their matrices.

    As many matrices of a stack as divide among the devices are an exchange. All that are left, the
    largest first, follow in exchanges of one matrix a device, as all devices send as much as those
    of the largest.

    Args:
      stacks: The number of matrices of each stack, and the number of elements of one.
      devices: The number of devices.

    Example:
      >>> exchanges([(5, 9), (3, 8)], 4)
      [[(0, range(0, 4))], [(0, [4]), (1, [0, 1, 2])]]
    """
    even = [count // devices * devices for count, _ in stacks]
    order = sorted(range(len(stacks)), key=lambda i: -stacks[i][1])
    left = [(i, k) for i in order for k in range(even[i], stacks[i][0])]
    found: list[list[tuple[int, Sequence[int]]]] = [
        [(i, range(n))] for i, n in enumerate(even) if n
    ]
    for at in range(0, len(left), devices):
        some = itertools.groupby(left[at : at + devices], lambda pair: pair[0])
        found.append([(i, [k for _, k in pairs]) for i, pairs in some])
    return found


def copies_of(stacks: Sequence[tuple[int, int]], devices: int) -> list[int]:
    """Returns for each stack the number of devices that compute with the same matrix, so that none
    is idle: each returns another part of the result.

    Args:
      stacks: The number of matrices of each stack, and the number of elements of one.
      devices: The number of devices.

    Example:
      >>> copies_of([(1, 4), (2, 1)], 8)
      [5, 1]
    """
    copies = [1] * len(stacks)
    while True:
        i = max(range(len(stacks)), key=lambda i: stacks[i][1] / copies[i])
        taken = sum(n * count for n, (count, _) in zip(copies, stacks, strict=True))
        if taken + stacks[i][0] > devices:
            return copies
        copies[i] += 1


def _place(axis: str) -> tuple[str, int]:
    """Returns the place of an axis, or of a part of one, in the order of the devices."""
    return layout.full_axis(axis), layout.before(axis)


def _wide(x: jax.Array, size: int) -> jax.Array:
    """Fills the last dimension with zeros."""
    return pad(x, (*x.shape[:-1], size))


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
