"""Arguments of parameters that a step does not train: a teacher, a reference model.

The user names them by ``frozen_argnums``. Arrays among them that are sharded over ZeRO's axis enter
the step as shards, and are gathered where the step uses them, like the step's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zerojax.collectives import Inserter, Shard, gather_once
from zerojax.devices.mesh import same_devices
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.state_sharding import Plan
from zerojax.step.call import Frozen, Further
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Jaxpr, PyTree


def with_specs(further: Further, spec_of: Callable[[Any, int], Spec | None]) -> Further:
    """Returns further arguments with the specs of the arrays of each :class:`Frozen` among them.

    Args:
      further: The arguments.
      spec_of: :func:`spec_on` of the step's plan, cached, because every step asks for every array.
    """

    def known(argument: PyTree) -> PyTree:
        if not isinstance(argument, Frozen):
            return argument
        arrays = jax.tree.leaves(argument.value)
        specs = (spec_of(getattr(x, "sharding", None), np.ndim(x)) for x in arrays)
        return Frozen(argument.value, tuple(specs))

    return tuple(map(known, further))


def spec_on(plan: Plan, sharding: object, ndim: int) -> Spec | None:
    """Returns the spec of an array; None if it is not sharded over the plan's axis."""
    if not isinstance(sharding, NamedSharding):
        return None
    mesh: Any = sharding.mesh
    if not isinstance(mesh, Mesh) or not same_devices(layout.merge_axes(mesh), plan.mesh):
        return None
    spec = layout.cutting(layout.full(sharding.spec, ndim), plan.mesh)
    spec = layout.join_axes(spec, plan.axis, plan.mesh)
    return spec if layout.dimensions(spec, plan.axis) else None


def enter_arguments(inserter: Inserter, further: Further) -> dict[int, Shard]:
    """Returns the shards of the arrays of each :class:`Frozen`, by ``id`` of the array."""
    chosen = [
        (x, spec)
        for argument in further
        if isinstance(argument, Frozen)
        for x, spec in zip(jax.tree.leaves(argument.value), argument.specs, strict=True)
        if spec is not None
    ]
    shards = [Shard(x, spec) for x, spec in chosen]
    shards = gather_once.gather(shards, gather_once.by_plan(shards, inserter), inserter)
    return {id(x): shard for (x, _), shard in zip(chosen, shards, strict=True)}


class WithShards(NamedTuple):
    """A traced step, with shards as the constants that are shards of frozen arguments.

    Attributes:
      jaxpr: The open jaxpr.
      consts: Its constants.
    """

    jaxpr: Jaxpr
    consts: tuple[jax.Array | Shard, ...]

    @classmethod
    def of(cls, closed: AnyJaxpr, shards: dict[int, Shard]) -> WithShards:
        """Replaces arrays by their shards in a step that was traced on the arrays."""
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        # What a function closes over is a constant of its trace, as the same object.
        return cls(jaxpr, tuple(shards.get(id(x), x) for x in consts))

    def replace(self, *, jaxpr: Jaxpr) -> WithShards:
        """Returns another open jaxpr with the same constants, like the method of a closed jaxpr."""
        return self._replace(jaxpr=jaxpr)
