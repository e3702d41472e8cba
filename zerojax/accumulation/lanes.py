"""Gradient sums over devices once per update instead of once per micro-batch.

Where every device has the unsharded parameters, the contributions of its rows to a gradient need
not be summed over the devices before the update. But to XLA the gradient of a batch that is sharded
over the devices is that sum, and XLA reduces it at once. So a micro-batch is divided further, into
one lane per device, and the step runs on all lanes side by side: every array has one more
dimension, sharded over the devices, along which nothing is summed until all micro-batches are done.
With replica groups, each group is a lane, within which gradients are reduce-scattered as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as prims
from jax.interpreters import batching
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.accumulation.kinds import RowKind
from zerojax.collectives.gathering import is_gathered, plain
from zerojax.collectives.shard import Shard, moved_stack
from zerojax.devices.mesh import REPLICA, batch_axes, sequence_size
from zerojax.graph.primitives import NEVER_ON_LANES, NOT_ON_LANES
from zerojax.graph.search import equations, named
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation


class Lanes(NamedTuple):
    """Devices, or groups of devices, that each sum the contributions of their own rows.

    Attributes:
      mesh: The mesh of all devices.
      axes: The axes of the mesh over which nothing is summed before the update.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh, *, sharded: bool) -> Lanes | None:
        """Returns one lane per device, or one per replica group if gradients are ``sharded``. None
        if there would be a single lane, if the replica axis is not the outermost batch axis, or if
        devices share the tokens of a row."""
        if sequence_size(mesh) > 1:
            return None
        axes = tuple(name for name in batch_axes(mesh) if not sharded or name == REPLICA)
        lanes = cls(mesh, axes)
        # A lane has consecutive rows, so that its axes must be the outermost ones of the batch.
        return lanes if lanes.number > 1 and axes == batch_axes(mesh)[: len(axes)] else None

    @property
    def number(self) -> int:
        """The number of lanes."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    def entering(self, args: Sequence[Any]) -> list[Any]:
        """Returns a step's arguments for the lanes. In a lane of one device a gathered parameter is
        a plain array, except for a stack that loops read in the layout of the gather, which the
        shard holds."""
        if self.axes == (REPLICA,):
            return list(args)
        # Beside shards, arrays of rows with the shape of a parameter would be taken for shards too.
        return [x.unsharded if is_gathered(x) and moved_stack(x) is None else x for x in args]

    def run(
        self,
        task: Callable[[Sequence[jax.Array]], Sequence[Shard | jax.Array]],
        rows: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Returns a task's results on each lane's rows, [lanes, ...].

        Args:
          task: Function from arrays [rows / lanes, ...] to results.
          rows: Arrays [rows, ...], sharded over the devices.
        """
        # Consecutive rows lie on one device, so that the reshape moves none.
        per_lane = [x.reshape(self.number, -1, *x.shape[1:]) for x in rows]

        def lane(rows: Sequence[jax.Array]) -> list[jax.Array]:
            return [plain(x) for x in task(rows)]

        name: Any = self.axes
        # By spmd_axis_name, jax.vmap shards the lanes in the constraints of the step too.
        return jax.vmap(lane, spmd_axis_name=name)([self.constrain(x) for x in per_lane])

    def constrain(self, value: jax.Array, spec: Spec | None = None) -> jax.Array:
        """Places each lane of an array [lanes, ...] on its own devices; ``spec``, if given, shards
        the other dimensions."""
        rest = [PartitionSpec.UNCONSTRAINED] * (value.ndim - 1) if spec is None else spec
        sharding = NamedSharding(self.mesh, PartitionSpec(self.axes, *rest))
        return lax.with_sharding_constraint(value, sharding)

    def suit(self, program: Any) -> bool:
        """Returns whether all equations of a program, in loops and calls too, can run on all lanes
        side by side."""
        return not any(map(self._is_obstacle, equations(program)))

    def may_suit(self, program: Any) -> bool:
        """Returns whether lanes may suit a step, traced on the global batch, so that a trace on a
        lane's micro-batch is worthwhile."""
        return not any(named(program, *NEVER_ON_LANES))

    def _is_obstacle(self, eqn: Equation) -> bool:
        if eqn.effects or eqn.primitive.name in NOT_ON_LANES or not _is_batched(eqn):
            return True
        if eqn.primitive is not prims.sharding_constraint_p:
            return False
        # jax.vmap refuses a constraint to the axes of spmd_axis_name.
        spec = getattr(jaxprs.param(eqn, "sharding"), "spec", None)
        return spec is None or any({*layout.axes(entry)} & {*self.axes} for entry in spec)


def _is_batched(eqn: Equation) -> bool:
    """Returns whether ``jax.vmap`` can batch an equation."""
    has_no_operands = not jaxprs.variables(eqn.invars)  # such as an iota
    is_call = eqn.primitive in jaxprs.CALLS
    # The table in which jax.vmap looks for the rule of a primitive.
    return has_no_operands or is_call or eqn.primitive in batching.fancy_primitive_batchers


def rows_of_all(value: jax.Array, kind: RowKind) -> jax.Array:
    """Returns the rows of all lanes in their order, from the lanes' results [lanes, ...]."""
    lanes, outer = value.shape[0], kind.outer or 1
    rows = jnp.moveaxis(value, kind.dim + 1, 1)
    n, rest = rows.shape[1] // outer, rows.shape[2:]
    rows = rows.reshape(lanes, outer, n, *rest).swapaxes(0, 1).reshape(outer * lanes * n, *rest)
    return jnp.moveaxis(rows, 0, kind.dim)
