"""The plan: for every leaf, how it lies over the devices, and why.

A stage is a table of specs, no more. Stage by stage, over the shard axis:

=====  ===================  =================  ============================================
stage  masters and moments  gradients          compute parameters
=====  ===================  =================  ============================================
0      whole                whole              whole
1      sharded              whole              gathered once a step
2      sharded              sharded            gathered once a step
3      sharded              sharded            gathered where used, again in the backward
=====  ===================  =================  ============================================

With partitions (hpZ) stage 3 gathers once a step between them, and where used within one. What
stays gathered at stage 3 (:mod:`zerojax.plan.live`) is gathered once a step, as at stage 2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import (
    REPLICA,
    are_there,
    axis_size,
    batch_axes,
    batch_devices,
    joined_axes,
)
from zerojax.plan import error_feedback, layout, table
from zerojax.plan.layout import Spec
from zerojax.plan.leaf import Leaf
from zerojax.plan.live import Live
from zerojax.plan.places import DEVICE, DISK, HOST, PINNED, offloads, reaches_host
from zerojax.plan.quantized import QuantizedWeights
from zerojax.plan.rule import is_small
from zerojax.plan.stored import pad, shown, stored
from zerojax.train_state.state_parts import Parts
from zerojax.xla.compiler import GPUS

DTYPES: dict[str | None, Any] = {
    None: None,
    "fp32": jnp.float32,
    "bf16": jnp.bfloat16,
    "fp16": jnp.float16,
}
"""What the config calls dtypes."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Specs of the whole state. ``str(plan)`` is a table.

    Attributes:
      mesh, axis: the devices, and the axis over which ZeRO shards.
      config: what the plan was made for.
      params, grads, opt_state, step, rest: trees of ``PartitionSpec`` at rest. ``grads`` is how
        gradients are accumulated.
      leaves: the same as a list for ``params``, ``opt_state`` and ``rest``, with reasons.
      compute: the parameters as the step computes with them, in the order of ``params``.
      quantized: those of them that are gathered in blocks of few bits (qwZ).
    """

    mesh: Mesh
    axis: str
    config: ZeroConfig
    params: Any
    grads: Any
    opt_state: Any
    step: Any
    rest: Any
    leaves: dict[str, tuple[Leaf, ...]]
    compute: tuple[Leaf, ...]
    quantized: QuantizedWeights

    @property
    def bytes_per_device(self) -> int:
        """Bytes that the state occupies at rest in the memory of the fullest device."""
        return self.bytes_in(DEVICE)

    def all_leaves(self) -> list[Leaf]:
        """One for each leaf of the state's parts, in order."""
        step = Leaf("step", (), jnp.dtype(jnp.int32), self.step, self.step, "", 4, 4)
        leaves = self.leaves
        return [*leaves["params"], *leaves["opt_state"], step, *leaves["rest"]]

    def bytes_in(self, place: str) -> int:
        """Bytes of the state at rest that one device has in ``place``."""
        return sum(
            leaf.bytes_per_device
            for group in self.leaves.values()
            for leaf in group
            if leaf.place == place
        )

    @functools.cached_property
    def plain(self) -> bool:
        """Whether every array of the state lies at rest as JAX shards one."""
        return all(leaf.plain for leaf in self.all_leaves())

    @property
    def lost(self) -> str:
        """What each device holds beyond its share, in a sentence; empty where it is nothing."""
        whole = [leaf for leaf in self.all_leaves() if leaf.lost]
        if not whole:
            return ""
        lost, largest = sum(leaf.lost for leaf in whole), max(whole, key=lambda leaf: leaf.lost)
        held = sum(leaf.bytes_per_device for leaf in self.all_leaves())
        return (
            f"{table.size(lost)} of each device's {table.size(held)} is beyond "
            f"its share: {len(whole)} arrays have no dimensions that all of "
            f"{axis_size(self.mesh, self.axis)} devices divide, the largest {largest.path} "
            f"{largest.shape}"
        )

    @property
    def kept_whole(self) -> str:
        """What each device holds of extra state that is not sharded, where that is much and there
        are devices to share it, in a sentence; else empty."""
        shared = self.config.stage > 0 and axis_size(self.mesh, self.axis) > 1
        return table.kept_whole(self.leaves["rest"]) if shared else ""

    @property
    def streamed(self) -> list[bool]:
        """Of each leaf of the optimizer state, whether it is an array: under offload those are
        updated in sub-groups, and numbers with the gradients."""
        return [bool(leaf.shape) for leaf in self.leaves["opt_state"]]

    def shardings(self) -> Parts:
        """Where everything lies as :class:`jax.sharding.NamedSharding`, in the form of the
        state's parts. What lies on disk has that of its way to the device."""

        def placed(specs: Any, leaves: Sequence[Leaf]) -> Any:
            tree = jax.tree.structure(specs, is_leaf=_is_spec)
            return jax.tree.unflatten(tree, [self.sharding(leaf) for leaf in leaves])

        return Parts(
            placed(self.params, self.leaves["params"]),
            placed(self.opt_state, self.leaves["opt_state"]),
            NamedSharding(self.lowering_mesh, self.step),
            placed(self.rest, self.leaves["rest"]),
        )

    def at_rest(self, parts: Parts) -> Parts:
        """A state with padding; under ``jit``."""
        return self.each(lambda x, leaf: pad(x, leaf.padded), parts, self.all_leaves())

    def without_padding(self, parts: Parts) -> Parts:
        """The same without; under ``jit``."""
        return self.each(self.unpadded, parts, self.all_leaves())

    def unpadded(self, x: Any, leaf: Leaf) -> Any:
        """One array without its padding, each device with its own piece; under ``jit``."""
        if leaf.even:
            return x
        whole = x[tuple(map(slice, leaf.shape))]
        return lax.with_sharding_constraint(whole, self.sharding(leaf))

    def stored(self, parts: Parts) -> Parts:
        """The arrays of a state at rest, given its leaves."""
        return parts if self.plain else stored(parts)

    def shown(self, parts: Parts) -> Parts:
        """The leaves of a state, given its arrays at rest."""
        return (
            parts
            if self.plain
            else self.each(lambda x, leaf: shown(x, leaf.shape), parts, self.all_leaves())
        )

    def results(self, out: Any) -> Any:
        """What a user's function returns beside the state; under ``jit``, which cannot tell how
        those lie that follow from an array on a divided mesh."""
        if not any(leaf.divided for leaf in self.all_leaves()):
            return out
        rows, n = batch_axes(self.mesh), batch_devices(self.mesh)

        def placed(x: Any) -> Any:
            spec = [rows] if jnp.ndim(x) and len(x) % n == 0 else []
            return lax.with_sharding_constraint(x, layout.sharding(self.mesh, spec))

        return jax.tree.map(placed, out)

    @staticmethod
    def each(function: Callable[[Any, Leaf], Any], tree: Any, leaves: Sequence[Leaf]) -> Any:
        """A tree of arrays, each replaced; ``leaves`` are those of the plan in the same order."""
        arrays, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(function, arrays, leaves))

    def sharding(self, leaf: Leaf) -> NamedSharding:
        """Where one leaf of this plan lies."""
        kind = PINNED if leaf.place == HOST else None
        return layout.sharding(self.lowering_mesh, leaf.spec, kind)

    def on_device(self, specs: Any) -> Any:
        """A tree of specs as shardings in device memory."""
        return jax.tree.map(
            lambda spec: layout.sharding(self.lowering_mesh, spec), specs, is_leaf=_is_spec
        )

    @property
    def lowering_mesh(self) -> Any:
        """The mesh to lower for: without its devices where they are not there and something lies
        in host memory, which jax forgets for such devices."""
        virtual = reaches_host(self.config) and not are_there(self.mesh)
        return self.mesh.abstract_mesh if virtual else self.mesh

    def table(self) -> str:
        """Every parameter with its spec, bytes per device and, where it is whole, the reason."""
        n, config = axis_size(self.mesh, self.axis), self.config
        groups = self.mesh.shape.get(REPLICA)
        title = f"ZeRO stage {config.stage} over {n} devices (axis {self.axis!r})"
        if groups and config.stage == 0:
            title = f"ZeRO stage 0: a whole state on each of {batch_devices(self.mesh)} devices"
        elif groups:
            title += f" in each of {groups} replica groups"
        others = {
            a: k for a, k in self.mesh.shape.items() if a not in (*joined_axes(self.axis), REPLICA)
        }
        title += f", other axes {others}" if others else ""
        low = config.compute_dtype
        title += f", {low} compute with fp32 masters" if low else ""
        at_rest = {
            "params": self.leaves["params"],
            "grads": self.gradients(),
            "compute": self.copies(),
            "secondary": self.secondary(),
            "live": self.live.leaves,
        }
        notes = [
            f"{note.key} = {note.value} ({note.status}: {note.reason})"
            for note in config.notes
            if note.status in ("default", "resolved", "no effect")
        ]
        notes += [*self._far(), *self.live.notes, *self.quantized.notes]
        notes += error_feedback.notes(config, self.errors, self.gradients())
        platform = self.mesh.devices.flat[0].platform
        if self.config.xla_options and platform not in GPUS:
            notes.append(f"xla: options for GPUs, without effect on devices of {platform!r}")
        total = f"state at rest: {table.size(self.bytes_per_device)} per device"
        for place, where in ((HOST, "host memory"), (DISK, "disk")):
            if n_bytes := self.bytes_in(place):
                total += f", and {table.size(n_bytes)} of {where} for each"
        for said in (self.lost, self.kept_whole):
            title += f"\n{said}" if said else ""
        return table.render(title, {**at_rest, **self.leaves}, [total, *notes])

    __str__ = table

    def _far(self) -> list[str]:
        """What hpZ leaves to be gathered over all devices at each use."""
        size = self.config.zero_hpz_partition_size
        specs = [layout.full(leaf.spec, len(leaf.shape)) for leaf in self.compute]
        far = [
            leaf
            for leaf, spec in zip(self.compute, specs, strict=True)
            if layout.dimensions(spec, self.axis)
            and not is_small(leaf.shape, spec, self.axis)
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
        """Compute parameters that stay from step to step beside the state, as they do where
        something is offloaded."""
        if not offloads(self.config):
            return ()
        pairs = zip(self.compute, self.leaves["params"], strict=True)
        return tuple(leaf for leaf, rest in pairs if leaf != rest)

    @functools.cached_property
    def live(self) -> Live:
        """Compute parameters that stay gathered over an update."""
        return Live(self.config, self.compute, self.mesh, self.axis)

    @property
    def errors(self) -> list[Leaf]:
        """The errors of quantized gradients, each device's own."""
        leaves = jax.tree.unflatten(
            jax.tree.structure(self.opt_state, is_leaf=_is_spec), self.leaves["opt_state"]
        )
        return jax.tree.leaves(getattr(leaves, "error", None))

    def secondary(self) -> tuple[Leaf, ...]:
        """Compute parameters as the devices of one partition hold them during a step (hpZ)."""
        return tuple(
            dataclasses.replace(
                Leaf.of(leaf.path, leaf, spec, layout.full(leaf.whole, len(spec)), "", self.mesh),
                place=leaf.place,
            )
            for leaf in self.compute
            if (spec := self.secondary_spec(leaf)) is not None
        )

    def secondary_spec(self, leaf: Leaf) -> Spec | None:
        """The spec of a parameter that is gathered from the other partitions; None where it has no
        such secondary shard."""
        size, n = self.config.zero_hpz_partition_size, axis_size(self.mesh, self.axis)
        spec = layout.full(leaf.spec, len(leaf.shape))
        if leaf.path in self.live.paths:  # is gathered from all others at once
            return None
        if not 1 < size < n or is_small(leaf.shape, spec, self.axis):
            return None
        near = layout.inside(spec, self.axis, n // size)
        alone = math.prod(layout.parts(e, self.mesh) for e in layout.only(near, [self.axis]))
        return near if near != spec and alone == size else None

    def gradients(self) -> tuple[Leaf, ...]:
        """How gradients lie while they are accumulated: float32, in the form of ``grads``.

        Those of parameters in host memory leave for there."""
        specs = jax.tree.leaves(self.grads, is_leaf=_is_spec)
        return tuple(
            dataclasses.replace(
                Leaf.of(
                    leaf.path,
                    jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
                    layout.full(spec, len(leaf.shape)),
                    layout.full(leaf.whole, len(leaf.shape)),
                    leaf.reason,
                    self.mesh,
                ),
                place=DEVICE if now.place == DEVICE else HOST,
            )
            for leaf, spec, now in zip(self.leaves["params"], specs, self.compute, strict=True)
        )


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
