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

from zerojax.collectives import Inserter, Shard, kept
from zerojax.devices.mesh import same_devices
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.rule import shard_spec
from zerojax.plan.state_sharding import Plan
from zerojax.step.call import Static, divide, is_array
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Jaxpr, PyTree


class ArrayLayout(NamedTuple):
    """Shape and sharding of one array of an argument.

    Attributes:
      shape: Shape of the global array.
      spec: Spec of the array's sharding if it is over the plan's axis; else None.
    """

    shape: tuple[int, ...]
    spec: Spec | None


class ArgumentReader:
    """A detector of the further arguments of a step that are sharded like parameters.

    Args:
      plan: PartitionSpec of every leaf.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._form: PyTreeDef = jax.tree.structure(plan.params, is_leaf=_is_spec)
        self._own = tuple(
            ArrayLayout(leaf.shape, layout.full(leaf.spec, len(leaf.shape)))
            for leaf in plan.leaves["params"]
        )
        # Cached, because every step asks for every array.
        self._by_rule, self._spec = functools.cache(self._rule), functools.cache(self._spec_of)

    def __call__(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[list[ArrayLike], Static]:
        """Returns the arrays of further arguments, and the arguments without them, with specs."""
        arrays, static = divide(args, kwargs)
        specs: list[Spec | None] = []
        for argument in (*args, *(x for _, x in sorted(kwargs.items()))):
            specs += self._specs(argument)
        return arrays, static._replace(specs=tuple(specs))

    def _specs(self, argument: PyTree) -> Sequence[Spec | None]:
        leaves, tree = jax.tree.flatten(argument)
        arrays = [self._layout_of(x) for x in leaves if is_array(x)]
        sharded = [x for x in arrays if x.spec is not None]
        if sharded and (self._is_copy(tree, arrays) or self._by_rule(tuple(sharded))):
            return [x.spec for x in arrays]
        return [None] * len(arrays)

    def _layout_of(self, x: ArrayLike) -> ArrayLayout:
        sharding, shape = getattr(x, "sharding", None), tuple(np.shape(x))
        named = isinstance(sharding, NamedSharding)
        return ArrayLayout(shape, self._spec(sharding, len(shape)) if named else None)

    def _spec_of(self, sharding: NamedSharding, ndim: int) -> Spec | None:
        mesh: Any = sharding.mesh
        plan_mesh = self._plan.mesh
        if not isinstance(mesh, Mesh) or not same_devices(layout.merge_axes(mesh), plan_mesh):
            return None
        spec = layout.cutting(layout.full(sharding.spec, ndim), plan_mesh)
        spec = layout.join_axes(spec, self._plan.axis, plan_mesh)
        return spec if layout.dimensions(spec, self._plan.axis) else None

    def _is_copy(self, tree: PyTreeDef, arrays: Sequence[ArrayLayout]) -> bool:
        """Returns whether an argument is a copy of the parameters, each unsharded or as planned."""
        return tree == self._form and all(
            x in (own, own._replace(spec=None)) for x, own in zip(arrays, self._own, strict=True)
        )

    def _rule(self, sharded: tuple[ArrayLayout, ...]) -> bool:
        """Returns whether arrays are sharded by the rule for parameters, unlike rows of data."""
        plan = self._plan
        is_unlike_rows = any(0 not in layout.dimensions(x.spec or (), plan.axis) for x in sharded)
        return is_unlike_rows and all(
            shard_spec(x.shape, (None,) * len(x.shape), plan.mesh, plan.axis, 0).spec == x.spec
            for x in sharded
        )


def enter_arguments(
    inserter: Inserter, arrays: Sequence[jax.Array], specs: Sequence[Spec | None]
) -> dict[int, Shard]:
    """Returns the shards of the arrays that are sharded like parameters, by ``id`` of the array."""
    chosen = [(x, spec) for x, spec in zip(arrays, specs, strict=True) if spec is not None]
    shards = [Shard(x, spec) for x, spec in chosen]
    shards = kept.gather(shards, kept.by_plan(shards, inserter), inserter)
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
