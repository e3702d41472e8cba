"""Further arguments of a step that are sharded like parameters: a teacher, or a copy to compare.

They are gathered where the step uses them, like the step's parameters. Rows of data are sharded
along their first dimension, and so are many parameters. Therefore an argument counts as parameters
if it is a copy of the step's parameters, or a tree of arrays that are all sharded by the rule for
parameters, some of them along another dimension than the first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef
from jax.typing import ArrayLike

from zerojax.collectives import Inserter, Shard, gather_once
from zerojax.devices.mesh import same_devices
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import shard_spec
from zerojax.plan.state_sharding import Plan
from zerojax.step.call import Static, divide, is_array
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Jaxpr, PyTree


class ArgumentReader:
    """A detector of the further arguments of a step that are sharded like parameters.

    Args:
      plan: PartitionSpec of every leaf.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._nothing = plan, divide((), {})
        self._form: PyTreeDef = jax.tree.structure(plan.params, is_leaf=_is_spec)
        leaves = plan.leaves["params"]
        self._own_shapes = [leaf.shape for leaf in leaves]
        self._own_specs = [leaf.full_spec for leaf in leaves]
        # Cached, because every step asks for every array.
        self._by_rule, self._spec = functools.cache(self._rule), functools.cache(self._spec_of)

    def __call__(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[list[ArrayLike], Static]:
        """Returns the arrays of further arguments, and the arguments without them, with specs."""
        if not args and not kwargs:
            return self._nothing
        arrays, static = divide(args, kwargs)
        specs: list[Spec | None] = []
        for argument in (*args, *(x for _, x in sorted(kwargs.items()))):
            specs += self._specs(argument)
        return arrays, static._replace(specs=tuple(specs))

    def _specs(self, argument: PyTree) -> Sequence[Spec | None]:
        """Returns the spec of each array of an argument; None for an array that is not sharded
        over the plan's axis, and for all if the argument is not sharded like parameters."""
        leaves, tree = jax.tree.flatten(argument)
        arrays = [x for x in leaves if is_array(x)]
        shapes = [tuple(np.shape(x)) for x in arrays]
        shardings = [getattr(x, "sharding", None) for x in arrays]
        specs = [
            self._spec(sharding, len(shape)) if isinstance(sharding, NamedSharding) else None
            for sharding, shape in zip(shardings, shapes, strict=True)
        ]
        sharded = [(x, spec) for x, spec in zip(shapes, specs, strict=True) if spec is not None]
        is_like_parameters = sharded and (
            self._is_copy(tree, shapes, specs) or self._by_rule(tuple(sharded))
        )
        return specs if is_like_parameters else [None] * len(arrays)

    def _spec_of(self, sharding: NamedSharding, ndim: int) -> Spec | None:
        mesh: Any = sharding.mesh
        plan_mesh = self._plan.mesh
        if not isinstance(mesh, Mesh) or not same_devices(layout.merge_axes(mesh), plan_mesh):
            return None
        spec = layout.cutting(layout.full(sharding.spec, ndim), plan_mesh)
        spec = layout.join_axes(spec, self._plan.axis, plan_mesh)
        return spec if layout.dimensions(spec, self._plan.axis) else None

    def _is_copy(
        self, tree: PyTreeDef, shapes: list[tuple[int, ...]], specs: list[Spec | None]
    ) -> bool:
        """Returns whether an argument is a copy of the parameters, each unsharded or as planned."""
        if tree != self._form or shapes != self._own_shapes:
            return False
        return all(spec in (own, None) for spec, own in zip(specs, self._own_specs, strict=True))

    def _rule(self, sharded: tuple[tuple[tuple[int, ...], Spec], ...]) -> bool:
        """Returns whether arrays are sharded by the rule for parameters, unlike rows of data.

        Args:
          sharded: Shape and spec of each array.
        """
        plan = self._plan
        small = plan.config.small_array_size
        is_unlike_rows = any(0 not in layout.dimensions(spec, plan.axis) for _, spec in sharded)
        return is_unlike_rows and all(
            shard_spec(shape, (None,) * len(shape), plan.mesh, plan.axis, 0, small=small).spec
            == spec
            for shape, spec in sharded
        )


def enter_arguments(
    inserter: Inserter, arrays: Sequence[jax.Array], specs: Sequence[Spec | None]
) -> dict[int, Shard]:
    """Returns the shards of the arrays that are sharded like parameters, by ``id`` of the array."""
    chosen = [(x, spec) for x, spec in zip(arrays, specs, strict=True) if spec is not None]
    shards = [Shard(x, spec) for x, spec in chosen]
    shards = gather_once.gather(shards, gather_once.by_plan(shards, inserter), inserter)
    return {id(x): shard for (x, _), shard in zip(chosen, shards, strict=True)}


class WithShards(NamedTuple):
    """A traced step, with shards as the constants that are sharded like parameters.

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
        return cls(jaxpr, tuple(shards.get(id(x), x) for x in consts))

    def replace(self, *, jaxpr: Jaxpr) -> WithShards:
        """Returns another open jaxpr with the same constants, like the method of a closed jaxpr."""
        return self._replace(jaxpr=jaxpr)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)
