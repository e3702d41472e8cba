"""The plan: the sharding of every leaf of a state over the devices, with the reason.

A stage is nothing but a table of specs. By stage, over the shard axis:

=====  ===================  =================  ============================================
stage  masters and moments  gradients          compute parameters
=====  ===================  =================  ============================================
0      replicated           replicated         replicated
1      sharded              unsharded          gathered once a step
2      sharded              sharded            gathered once a step
3      sharded              sharded            gathered where used, again in the backward
=====  ===================  =================  ============================================

With partitions (hpZ) stage 3 gathers once a step between partitions, and at each use within a
partition. Parameters that stay gathered at stage 3 (:mod:`zerojax.plan.live`) are gathered once a
step, as at stage 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import (
    REPLICA,
    STAGE,
    are_present,
    axis_size,
    batch_axes,
    batch_devices,
    joined_axes,
    micro_batch_devices,
    stage_size,
    zero_axis,
)
from zerojax.plan import layout, table
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.live import Live
from zerojax.plan.places import DEVICE, DISK, HOST, PINNED, offloads, reaches_host
from zerojax.plan.quantized import Fp8Products, QuantizedWeights
from zerojax.plan.rule import is_small
from zerojax.plan.stored import pad, unpad, unwrap_stored, user_leaf
from zerojax.plan.table import Summarized, Summary, Table, leaves_table
from zerojax.train_state.state_parts import Parts
from zerojax.xla.compiler import GPUS
from zerojax.xla.types import PyTree

Tree = TypeVar("Tree")

DTYPES: dict[str | None, DTypeLike | None] = {
    None: None,
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
}
"""Dtypes by their names in the config."""

MUCH = 2**26
"""Bytes of replicated extra state up to which zerojax gives no warning."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Summarized):
    """The specs of a complete state, built by :func:`zerojax.plan.planning.make_plan`.

    ``str(plan)`` is the table of all parameters; ``repr(plan)`` is short.

    Attributes:
      mesh: the devices.
      config: the config that the plan follows.
      parts: the leaf of each array at rest, in the form of the state's parts. A leaf is no node of
        a pytree, so that ``jax.tree.map`` maps leaves as it maps arrays.
      compute: the parameters as the step computes with them, in the order of ``params``.
      quantized: the compute parameters that are gathered in low-bit blocks (qwZ).
      fp8: the compute parameters whose products run in fp8.
    """

    mesh: Mesh
    config: ZeroConfig
    parts: Parts
    compute: tuple[Leaf, ...]
    quantized: QuantizedWeights
    fp8: Fp8Products

    @functools.cached_property
    def axis(self) -> str:
        """The axis over which ZeRO shards."""
        return zero_axis(self.mesh)

    @functools.cached_property
    def params(self) -> PyTree:
        """The ``PartitionSpec`` of each parameter at rest."""
        return _specs(self.parts.params)

    @functools.cached_property
    def grads(self) -> PyTree:
        """The ``PartitionSpec`` in which each gradient is accumulated."""
        return _specs(self.parts.params, "own_spec" if self.config.stage < 2 else "spec")

    @functools.cached_property
    def opt_state(self) -> PyTree:
        """The ``PartitionSpec`` of each array of the optimizer state at rest."""
        return _specs(self.parts.opt_state)

    @functools.cached_property
    def step(self) -> PartitionSpec:
        """The ``PartitionSpec`` of the step counter."""
        return self.parts.step.spec  # type: ignore[no-any-return]

    @functools.cached_property
    def rest(self) -> PyTree:
        """The ``PartitionSpec`` of each array of the other state at rest."""
        return _specs(self.parts.rest)

    @functools.cached_property
    def leaves(self) -> dict[str, tuple[Leaf, ...]]:
        """The leaves of ``params``, ``opt_state`` and ``rest`` in order, with reasons."""
        groups = {name: getattr(self.parts, name) for name in ("params", "opt_state", "rest")}
        return {name: tuple(jax.tree.leaves(group)) for name, group in groups.items()}

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the state at rest in the memory of the device that holds most."""
        return self.bytes_in(DEVICE)

    def all_leaves(self) -> list[Leaf]:
        """Returns the leaves of all parts of the state, in order."""
        return jax.tree.leaves(self.parts)

    def bytes_in(self, place: str) -> int:
        """Returns the bytes per device of the state at rest in ``place``."""
        return sum(table.bytes_in(place, group) for group in self.leaves.values())

    @functools.cached_property
    def plain(self) -> bool:
        """True if JAX can shard every array of the state as it is stored at rest."""
        return all(leaf.plain for leaf in self.all_leaves())

    @property
    def lost(self) -> str:
        """A sentence on the bytes that each device holds beyond its share; empty for none."""
        leaves = self.all_leaves()
        affected = [leaf for leaf in leaves if leaf.lost]
        if not affected:
            return ""
        largest = max(affected, key=lambda leaf: leaf.lost)
        return (
            f"{table.size(sum(leaf.lost for leaf in affected))} of each device's "
            f"{table.size(sum(leaf.bytes_per_device for leaf in leaves))} is beyond "
            f"its share: {len(affected)} arrays have no dimensions that all of "
            f"{axis_size(self.mesh, self.axis)} devices divide, the largest {largest.path} "
            f"{largest.shape}"
        )

    @property
    def replicated_state(self) -> str:
        """A sentence on the extra state that every device replicates; empty if that state is below
        ``MUCH`` or no devices could share it."""
        replicated = [x for x in self.leaves["rest"] if x.reason and not x.sharded and x.bytes]
        n_bytes = sum(leaf.bytes_per_device for leaf in replicated)
        if n_bytes < MUCH or not self.config.stage or axis_size(self.mesh, self.axis) == 1:
            return ""
        largest = max(replicated, key=lambda leaf: leaf.bytes_per_device)
        return (
            f"{table.size(n_bytes)} of state beside the parameters is replicated on each device: "
            f"{len(replicated)} arrays, the largest {largest.path} {largest.shape} "
            f"({largest.reason})"
        )

    @property
    def streamed(self) -> list[bool]:
        """True for each leaf of the optimizer state with dimensions: offload updates such arrays in
        sub-groups, and scalars together with the gradients."""
        return [bool(leaf.shape) for leaf in self.leaves["opt_state"]]

    def shardings(self) -> Parts:
        """Returns the :class:`jax.sharding.NamedSharding` of every array, in the form of the
        state's parts. A leaf on disk has the sharding in which it is sent to the device."""
        shardings: Parts = jax.tree.map(self.sharding, self.parts)
        return shardings

    def at_rest(self, parts: Parts) -> Parts:
        """Pads the arrays of a state to their shapes at rest; call under ``jit``."""
        return self.each(lambda x, leaf: pad(x, leaf.padded), parts, self.all_leaves())

    def without_padding(self, parts: Parts) -> Parts:
        """Removes the padding from the arrays of a state; call under ``jit``."""
        return self.each(self.unpadded, parts, self.all_leaves())

    def unpadded(self, x: PyTree, leaf: Leaf) -> PyTree:
        """Removes the padding of one array, sharded as the leaf is; call under ``jit``."""
        if leaf.even:
            return x
        return lax.with_sharding_constraint(unpad(x, leaf.shape), self.sharding(leaf))

    def stored(self, state: Tree) -> Tree:
        """Replaces the leaves of a state that the user sees by their arrays at rest."""
        return state if self.plain else unwrap_stored(state)

    def shown(self, state: Tree) -> Tree:
        """Replaces the arrays of a state at rest by the leaves that the user sees."""
        return (
            state
            if self.plain
            else self.each(lambda x, leaf: user_leaf(x, leaf.shape), state, self.all_leaves())
        )

    def results(self, out: PyTree) -> PyTree:
        """Constrains the further results of a user's function; call under ``jit``.

        A result computed from an array on a divided mesh would be on that mesh too, and its spec
        would name parts of axes that the user's mesh does not have.
        """
        if not any(leaf.divided for leaf in self.all_leaves()):
            return out
        rows, n = batch_axes(self.mesh), batch_devices(self.mesh)

        def placed(x: PyTree) -> PyTree:
            spec = [rows] if jnp.ndim(x) and len(x) % n == 0 else []
            return lax.with_sharding_constraint(x, layout.sharding(self.mesh, spec))

        return jax.tree.map(placed, out)

    @staticmethod
    def each(function: Callable[[Any, Leaf], object], tree: Tree, leaves: Sequence[Leaf]) -> Tree:
        """Maps ``function`` over the arrays of a tree and their leaves in the plan, in order."""
        arrays, structure = jax.tree.flatten(tree)
        return cast(Tree, jax.tree.unflatten(structure, map(function, arrays, leaves)))

    def sharding(self, leaf: Leaf) -> NamedSharding:
        """Returns the sharding of one leaf of this plan, with its memory kind."""
        kind = PINNED if leaf.place == HOST else None
        return layout.sharding(self.lowering_mesh, leaf.spec, kind)

    def on_device(self, specs: PyTree) -> PyTree:
        """Turns a tree of specs into shardings in device memory."""
        return jax.tree.map(lambda spec: layout.sharding(self.lowering_mesh, spec), specs)

    @property
    def lowering_mesh(self) -> Any:
        """The mesh to lower for: abstract if its devices do not exist and arrays may be in host
        memory, because JAX drops the memory kind for such devices."""
        virtual = reaches_host(self.config) and not are_present(self.mesh)
        return self.mesh.abstract_mesh if virtual else self.mesh

    def table(self) -> str:
        """Lists every parameter and every other large array with its spec, bytes per device and, if
        replicated, the reason; then the totals, and notes on what changes the numbers."""
        config, groups = self.config, self._groups()
        large = [x for x in groups["rest"] if math.prod(x.shape) > config.small_array_size]
        listed = [*groups["params"], *large]
        rows = [table.HEADS, *(table.cells([leaf]) for leaf in listed)]
        if any(leaf.place != DEVICE for leaves in groups.values() for leaf in leaves):
            places = ["in", *(leaf.place for leaf in listed)]
            rows = [(*row[:-1], place, row[-1]) for row, place in zip(rows, places, strict=True)]
        totals = table.totals_rows(groups)
        right = range(1, len(totals[0]))
        notes = [
            f"{note.key} = {note.value} ({note.status}: {note.reason})"
            for note in config.notes
            if note.status in ("default", "resolved", "no effect")
        ]
        notes += [*self._far(), *self.live.notes, *self.quantized.notes, *self.fp8.notes]
        platform = self.mesh.devices.flat[0].platform
        if config.xla and platform not in GPUS:
            notes.append(f"xla: options for GPUs, without effect on devices of {platform!r}")
        tables = [*table.columns(rows, right=(4,)), "", *table.columns(totals, right=right)]
        return "\n".join([self._title(), "", *tables, "", self._total(), *notes])

    __str__ = table

    def summary(self) -> Summary:
        """Returns the title, the totals and the parameters, equal layers as one row."""
        totals = Table(table.totals_rows(self._groups()), right=(1, 2, 3, 4))
        note = f"plan.table() has all {len(self.leaves['params']):,} parameters and the notes"
        parameters = leaves_table(self.leaves["params"])
        return Summary(self._title(), (totals, parameters), (self._total(), note))

    def _groups(self) -> dict[str, Sequence[Leaf]]:
        """Returns the leaves by group, see ``table.GROUPS``."""
        return {
            "params": self.leaves["params"],
            "grads": self.gradients(),
            "compute": self.copies(),
            "secondary": self.secondary(),
            "live": self.live.leaves,
            **self.leaves,
        }

    def _title(self) -> str:
        """Returns the stage and the devices, then warnings on what cannot be sharded."""
        n, config = axis_size(self.mesh, self.axis), self.config
        groups = self.mesh.shape.get(REPLICA)
        title = f"ZeRO stage {config.stage} over {n} devices (axis {self.axis!r})"
        if groups and config.stage == 0:
            n = micro_batch_devices(self.mesh)
            title = f"ZeRO stage 0: a full state on each of {n} devices"
        elif groups:
            title += f" in each of {groups} replica groups"
        others = {
            a: k
            for a, k in self.mesh.shape.items()
            if a not in (*joined_axes(self.axis), REPLICA, STAGE)
        }
        stages = stage_size(self.mesh)
        title += f", {stages} pipeline stages" if stages > 1 else ""
        title += f", other axes {others}" if others else ""
        low = config.compute_dtype
        title += f", {low} compute with fp32 masters" if low else ""
        title += " and bf16 moments" if config.bf16_moments else ""
        for sentence in (self.lost, self.replicated_state):
            title += f"\n{sentence}" if sentence else ""
        return title

    def _total(self) -> str:
        """Returns a sentence on the bytes of the state at rest."""
        total = f"state at rest: {table.size(self.bytes_per_device)} per device"
        for place, where in ((HOST, "host memory"), (DISK, "disk")):
            if n_bytes := self.bytes_in(place):
                total += f", and {table.size(n_bytes)} of {where} for each"
        return total

    def _far(self) -> list[str]:
        """Notes the parameters that hpZ leaves to be gathered over all devices at each use."""
        size = self.config.zero_hpz_partition_size
        far = [
            leaf
            for leaf in self.compute
            if layout.dimensions(leaf.full_spec, self.axis)
            and not is_small(leaf.shape, leaf.full_spec, self.axis, self.config.small_array_size)
            and self.secondary_spec(leaf) is None
            and leaf.path not in self.live.paths
        ]
        if not far or not 1 < size < axis_size(self.mesh, self.axis):
            return []
        names = ", ".join(leaf.path for leaf in far[:4]) + (", ..." if far[4:] else "")
        return [
            f"zero_hpz_partition_size = {size}: {len(far)} parameters "
            f"({table.size(sum(leaf.bytes for leaf in far))}) have no secondary shard and are "
            f"gathered over all devices at each use: {names}"
        ]

    def copies(self) -> tuple[Leaf, ...]:
        """Returns the compute parameters that are kept beside the state from step to step; there
        are none without offload."""
        if not offloads(self.config):
            return ()
        pairs = zip(self.compute, self.leaves["params"], strict=True)
        return tuple(leaf for leaf, at_rest in pairs if leaf != at_rest)

    @functools.cached_property
    def live(self) -> Live:
        """The compute parameters that stay gathered for an entire update."""
        return Live(self.config, self.compute, self.mesh)

    def secondary(self) -> tuple[Leaf, ...]:
        """Returns the compute parameters as one partition stores them during a step (hpZ)."""
        return tuple(
            leaf.with_spec(spec, self.mesh)
            for leaf in self.compute
            if (spec := self.secondary_spec(leaf)) is not None
        )

    def secondary_spec(self, leaf: Leaf) -> Spec | None:
        """Returns the spec of a parameter's secondary shard (hpZ), which is gathered from the other
        partitions; None without a secondary shard."""
        size, n = self.config.zero_hpz_partition_size, axis_size(self.mesh, self.axis)
        spec = leaf.full_spec
        if leaf.path in self.live.paths:  # is gathered from all other devices at once
            return None
        small = self.config.small_array_size
        if not 1 < size < n or is_small(leaf.shape, spec, self.axis, small):
            return None
        inner_spec = layout.with_leaves(layout.inside(spec, self.axis, n // size), spec)
        n_shards = math.prod(
            layout.parts(e, self.mesh) for e in layout.only(inner_spec, [self.axis])
        )
        return inner_spec if inner_spec != spec and n_shards == size else None

    def gradients(self) -> tuple[Leaf, ...]:
        """Returns the accumulated gradients in the form of ``grads``, with the dtypes of the
        parameters at rest.

        The gradient of an offloaded parameter is sent to host memory."""
        at_rest = self.leaves["params"]
        forms = (
            [leaf.with_spec(leaf.own_spec, self.mesh, leaf.reason) for leaf in at_rest]
            if self.config.stage < 2
            else at_rest
        )
        return tuple(
            dataclasses.replace(form, place=DEVICE if leaf.place == DEVICE else HOST)
            for form, leaf in zip(forms, self.compute, strict=True)
        )


def _specs(leaves: PyTree, name: str = "spec") -> PyTree:
    return jax.tree.map(operator.attrgetter(name), leaves)
