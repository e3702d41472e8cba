"""Conversion of a step that is written for explicit mesh axes to automatic axes.

Under ``jax.set_mesh`` of a mesh with explicit axes, every array's type has its sharding, and a step
may request one (``out_sharding=``, ``jax.sharding.reshard``). zerojax places collectives through
constraints, which take only automatic axes. So the step is traced with explicit axes, by jax's own
rules, and its jaxpr is rewritten without them: a requested sharding over the axes of the batch
becomes a constraint, the rest is left to XLA. The conversion changes no number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.devices.mesh import batch_axes, explicit_axes
from zerojax.graph.primitives import CONTRACTIONS
from zerojax.plan.state_sharding import Plan, layout
from zerojax.train_state.state_parts import Parts
from zerojax.xla import hijax, jaxprs
from zerojax.xla.rewriter import map_jaxprs
from zerojax.xla.types import AnyJaxpr, Equation, PyTree


def make_jaxpr(
    function: Callable[..., PyTree],
    args: Sequence[PyTree],
    specs: Sequence[PyTree],
    mesh: Mesh,
    names: tuple[str, ...],
) -> tuple[core.ClosedJaxpr, PyTree]:
    """Calls ``jax.make_jaxpr(function, return_shape=True)(*args)`` with some axes of the mesh
    explicit while ``function`` is traced; the jaxpr has automatic axes.

    Args:
      function: A function of trees of arrays.
      args: Its arguments, arrays or abstract ones.
      specs: For each argument a tree of ``PartitionSpec``, or a prefix of one: the shardings in the
        types of its arrays.
      mesh: The mesh, with automatic axes.
      names: The names of the explicit axes.
    """

    def type_of(spec: PartitionSpec) -> PartitionSpec:
        # JAX refuses automatic axes in the sharding of a type.
        return PartitionSpec(*layout.only(tuple(spec), names))

    types = jax.tree.map(type_of, tuple(specs), is_leaf=lambda s: isinstance(s, PartitionSpec))

    def explicit(*args: PyTree) -> PyTree:
        return jax.sharding.explicit_axes(function, axes=names, in_sharding=types)(*args)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        try:
            closed, shape = hijax.trace(explicit, *args)
        except Exception as error:
            error.add_note(
                f"zerojax: this was traced under jax.set_mesh with the explicit axes {names}. Make "
                "the mesh with axis_types=(AxisType.Auto, ...) to leave shardings to the compiler."
            )
            raise
        return _automatic(closed, mesh), shape


def evaluate(
    function: Callable[..., PyTree], args: Sequence[PyTree], mesh: Mesh, names: tuple[str, ...]
) -> PyTree:
    """Returns ``function(*args)`` for replicated arrays, with some axes of the mesh explicit inside
    ``function``."""
    closed, shape = make_jaxpr(function, args, [PartitionSpec()] * len(args), mesh, names)
    outs = core.jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


class Explicit(NamedTuple):
    """The explicit axes of a step, and the shardings in the types of its batch.

    Attributes:
      names: The names of the explicit axes.
      batch: The spec of each leaf of the batch as it is passed in; an array without a sharding
        is replicated, as under plain jit.
    """

    names: tuple[str, ...]
    batch: tuple[PartitionSpec, ...]

    @classmethod
    def of(cls, names: tuple[str, ...], batch: PyTree) -> Explicit | None:
        """Returns the axes and specs for a batch; None if no axis is explicit."""

        def spec(x: object) -> PartitionSpec:
            sharding = getattr(x, "sharding", None)
            return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()

        return cls(names, tuple(map(spec, jax.tree.leaves(batch)))) if names else None

    def trace(
        self, body: Callable[..., PyTree], parts: Parts, batch: PyTree, plan: Plan
    ) -> tuple[core.ClosedJaxpr, PyTree]:
        """Returns the jaxpr of ``body(parts, batch)``, and the shapes of its results. The types
        have the shardings without ZeRO."""
        specs = _of_parts(parts, plan), jax.tree.unflatten(jax.tree.structure(batch), self.batch)
        return make_jaxpr(body, (parts, batch), specs, plan.lowering_mesh, self.names)


def _of_parts(parts: Parts, plan: Plan) -> Parts:
    """Returns the specs in the types of a state's arrays, in the form of ``parts``. The optimizer
    state counts as replicated."""

    def own_specs(tree: PyTree, group: str) -> PyTree:
        specs = [leaf.own_spec for leaf in plan.leaves[group]]
        return jax.tree.unflatten(jax.tree.structure(tree), specs)

    view = parts.opt_state
    return Parts(
        own_specs(parts.params, "params"),
        dataclasses.replace(
            view,
            opt=PartitionSpec(),
            **{
                name: None if value is None else own_specs(value, "params")
                for name, value in vars(view).items()
                if name != "opt"
            },
        ),
        PartitionSpec(),
        own_specs(parts.rest, "rest"),
    )


def typed_replicated(tree: PyTree) -> PyTree:
    """Returns arrays from outside the trace as replicated arrays of explicit axes."""
    return jax.tree.map(
        lambda x: jax.sharding.reshard(x, PartitionSpec()) if isinstance(x, jax.Array) else x, tree
    )


def automatic_update(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer for a step with explicit axes; ``tx`` itself sees automatic axes."""

    def update(grads: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> PyTree:
        automatic = jax.sharding.auto_axes(
            lambda *args: tx.update(*args[:3], **args[3]), out_sharding=PartitionSpec()
        )
        return automatic(grads, state, params, extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _automatic(closed: AnyJaxpr, mesh: Mesh) -> core.ClosedJaxpr:
    """Returns a jaxpr without explicit axes, with all calls inlined but checkpoints."""
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in jaxprs.open_jaxpr(closed)[0].invars
    ]

    def run(eqn: Equation, values: list[jax.typing.ArrayLike]) -> Sequence[jax.typing.ArrayLike]:
        # An equation's own context has the explicit axes, by which JAX would type its results.
        with jaxprs.traced_where(eqn), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return _equation(eqn, [*map(_constant, values)], mesh)

    def function(*args: jax.Array) -> list[jax.typing.ArrayLike]:
        # Inlined, the equations of a checkpoint would lose its policy and its barrier.
        outs = jaxprs.evaluate(closed, args, run, lambda eqn: eqn.primitive is not prims.remat_p)
        return [*map(_constant, outs)]

    return jax.make_jaxpr(function)(*shapes)


def _equation(
    eqn: Equation, values: list[jax.typing.ArrayLike], mesh: Mesh
) -> Sequence[jax.typing.ArrayLike]:
    """Runs an equation without explicit axes; a sharding that it requests becomes a constraint."""
    requests = (jaxprs.param(eqn, name, None) for name in jaxprs.SHARDINGS)
    requested = next((sharding for sharding in requests if sharding is not None), None)
    if not isinstance(requested, NamedSharding) or not explicit_axes(requested.mesh):
        requested = None
    is_constraint = eqn.primitive is prims.sharding_constraint_p and requested is not None
    if is_constraint or eqn.primitive.name in ("reshard", "mesh_cast"):
        return [_placed(values[0], requested, mesh)]
    if eqn.primitive.name == "shard_map" and explicit_axes(jaxprs.param(eqn, "mesh")):
        raise NotImplementedError(
            "jax.shard_map is not supported in a step under explicit axes: make the mesh with "
            "jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto, ...))."
        )
    if eqn.primitive.name == "shard_map":
        return jaxprs.bind(eqn, values)
    params = map_jaxprs(eqn.params, lambda x: jaxprs.shaped_like(x, _automatic(x, mesh)))
    if requested is not None:
        params = params | dict.fromkeys(params.keys() & {*jaxprs.SHARDINGS})
    outs = jaxprs.bind(eqn, values, params)
    if eqn.primitive.name in CONTRACTIONS and requested is not None:
        return [_placed(outs[0], requested, mesh)]
    return outs


def _placed(
    x: jax.typing.ArrayLike, asked: NamedSharding | None, mesh: Mesh
) -> jax.typing.ArrayLike:
    """Constrains ``x`` to the requested sharding if that names an axis of the batch; otherwise
    returns ``x`` unchanged."""
    rows = batch_axes(mesh)
    if asked is None or not any(axis in rows for e in asked.spec for axis in layout.axes(e)):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, asked.spec))


def _constant(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """Converts an array that the step closes over to numpy if its type has explicit axes."""
    sharding = getattr(x, "sharding", None)
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    explicit = isinstance(sharding, NamedSharding) and explicit_axes(sharding.mesh)
    return np.asarray(x) if concrete and explicit else x
