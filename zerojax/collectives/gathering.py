"""How a shard becomes whole where it is used, and a gradient a shard where it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.collectives.adjacent import Wholes
from zerojax.collectives.host import Host, fetched
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.quantization import dequantize, quantize
from zerojax.collectives.shard import ReducedGradient, Shard
from zerojax.collectives.window import Window
from zerojax.devices.mesh import REPLICA, batch_axes, batch_devices, sequence_size
from zerojax.devices.network import near
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.quantized import AS_THEY_ARE, Sent, block_of
from zerojax.trace import marks

# By the name of a mark: what stands in for it, given its value.
Replacements = Mapping[str, Callable[[jax.Array], jax.Array]]


@dataclass
class Scope:
    """The stretch of program in which one gather of a parameter may serve several uses.

    One iteration of a loop or one rematerialised block: the gather dies with it. The body
    itself is no such stretch at stage 3: there each use gathers anew, held apart from the
    earlier ones by a barrier, so that no gathered parameter lives on to the backward pass.

    Attributes:
      share: one gather serves all uses in here.
      replace: what stands in for marks.
      host: how gradients leave for host memory; None where they stay.
      gathered: by ``id`` of a shard, the shard and the parameter whole.
      filled: by ``id`` of a shard that a loop has filled, the shard and the same gathered.
      seen: by ``id``, the shards that were gathered here and not kept.
      token: an array that the last gather was made for; the next one of the same shard waits for
        it.
      reduced: the gradients of each block of the backward pass, in order.
      used_whole: by ``id``, the shards that something else than lookups uses whole in here.
      rows: what was last looked up in a gathered table; the next such table waits for it.
      adjacent: the gathers that an equation shares with those next to it, and so do the equations
        of a function that it calls; None where none does.
      window: what holds gathers back in a body; None where they are free.
      cotangent: of the last block of the backward pass that was held back.
      batch_rows: of the batch; None where unknown.
      behind: whether loops in here reduce gradients one iteration behind.
      row_sums: by variable, the sums in here that are not added up over the devices yet.
      of_layer: whether this is one layer's stretch, in a loop over layers.
      of_step: whether this is one of several updates, an iteration or a branch.
    """

    share: bool
    replace: Replacements = field(default_factory=dict)
    host: Host | None = None
    gathered: dict[int, tuple[Shard, jax.Array]] = field(default_factory=dict)
    filled: dict[int, tuple[Shard, Shard]] = field(default_factory=dict)
    seen: dict[int, Shard] = field(default_factory=dict)
    token: jax.Array | None = None
    reduced: list[list[ReducedGradient]] = field(default_factory=list)
    used_whole: set[int] = field(default_factory=set)
    rows: jax.Array | None = None
    adjacent: Wholes | None = None
    window: Window | None = None
    cotangent: jax.Array | None = None
    batch_rows: int | None = None
    behind: bool = False
    row_sums: Mapping[Any, Any] = field(default_factory=dict)
    of_layer: bool = False
    of_step: bool = False

    def as_filled(self, value: Any) -> Any:
        """``value``, gathered if a loop in here has filled it."""
        return self.filled.get(id(value), (value, value))[1]

    def inner(
        self,
        row_sums: Mapping[Any, Any] | None = None,
        *,
        of_layer: bool = False,
        of_step: bool = False,
        share: bool = True,
    ) -> Scope:
        """That of a loop's iteration or a block, with partial sums of its own."""
        return Scope(
            share=share,
            replace=self.replace,
            host=self.host,
            batch_rows=self.batch_rows,
            row_sums=row_sums or {},
            of_layer=of_layer or self.of_layer,
            of_step=of_step,
        )

    def replaces(self, eqn: Any) -> bool:
        return any(marks.holds(eqn, name) for name in self.replace)


class Gatherer:
    """Gathers parameters and scatters gradients, over one axis of a mesh.

    Args:
      mesh: the mesh of all specs.
      axis: the axis over which ZeRO shards.
      keep: True gathers each parameter once and keeps it (stages 1 and 2), False gathers where
        used, drops, and gathers again (stage 3).
      sent: How parameters and gradients are sent.

    Attributes:
      as_they_are: Large gradients that are not sent quantized where others are: what makes them,
        and their shape.
      ledger: Notes the collectives.
    """

    def __init__(self, mesh: Mesh, axis: str, *, keep: bool, sent: Sent = AS_THEY_ARE) -> None:
        self.mesh, self.axis, self.keep, self.sent = mesh, axis, keep, sent
        self.replicas = mesh.shape.get(REPLICA, 1)
        self._apart: frozenset[str] = frozenset()
        self.as_they_are: list[tuple[str, tuple[int, ...]]] = []
        self.ledger = Ledger(mesh)

    def on_lanes(self, axes: Sequence[str]) -> Self:
        """The same for a program that runs on lanes, see :mod:`zerojax.accumulation.lanes`: along
        their ``axes`` nothing is placed, and no groups are summed."""
        apart = copy.copy(self)
        apart.replicas, apart._apart = 1, frozenset(axes)
        apart.ledger = self.ledger.on_lanes(axes)
        return apart

    def deferring_reductions(self) -> Self:
        """The same for a loop over micro-batches, behind which XLA moves the reductions: the ledger
        notes none."""
        other = copy.copy(self)
        other.ledger = self.ledger.without_reductions()
        return other

    @property
    def apart(self) -> bool:
        """Whether the shard axis has lanes along it: parameters alone are sharded over the axis,
        not what each lane makes."""
        return self.axis in self._apart

    @property
    def alone(self) -> bool:
        """Whether each device has rows, or tokens, of its own to sum over: not where some share a
        model's dimension, nor on lanes."""
        sharing = batch_devices(self.mesh) * sequence_size(self.mesh)
        return sharing == self.mesh.size > 1 and not self._apart

    @property
    def near(self) -> int:
        """The devices of the axis in one host, which gradients that are sent quantized are summed
        over first; 1 where that is not the same everywhere."""
        return near(self.mesh, self.axis)

    def constrain(self, value: jax.Array, spec: Sequence[Any]) -> jax.Array:
        """``value``, sharded as a spec says."""
        if not self._apart.isdisjoint(name for entry in spec for name in layout.axes(entry)):
            return value
        return self.placed(value, spec)

    def placed(self, value: jax.Array, spec: Sequence[Any]) -> jax.Array:
        """The same on lanes too, for a parameter or what is made of parameters alone: one for all
        lanes, which may lie along their axes."""
        return lax.with_sharding_constraint(value, layout.sharding(self.mesh, spec))

    def by_rows(self, value: Any, at: int = 0) -> Any:
        """An array with the rows of its dimension ``at`` each on their device; another value, or
        one whose rows do not divide among the devices, unchanged."""
        array = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)
        if self._apart or not array or value.ndim <= at:
            return value
        if value.shape[at] % batch_devices(self.mesh):
            return value
        entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * value.ndim
        entries[at] = batch_axes(self.mesh)
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return lax.with_sharding_constraint(value, sharding)

    def whole(self, value: jax.Array, spec: Sequence[Any], *, quantized: bool = False) -> jax.Array:
        """All-gathers a shard, whose own spec is pinned first. Otherwise XLA may move the cast that
        made it behind the gather and send twice the bytes. Codes and scales of one that is
        ``quantized`` XLA gathers together."""
        if quantized and (block := self._block(value, spec)) is not None:
            return self._as_codes(value, spec, block, lambda x: self.whole(x, spec))
        pinned = self.placed(value, spec)
        # XLA would gather over the innermost part first, and send all of that between hosts then.
        parts = layout.parts_of(spec, self.axis)[-2::-1]
        nearer = [layout.inside(spec, self.axis, layout.before(part)) for _, part in parts]
        for less in (*nearer, layout.without(spec, self.axis)):
            with self.ledger.gathers(pinned, spec, less):
                pinned = self.placed(pinned, less)
            spec = less
        return pinned

    def _block(self, value: jax.Array, spec: Sequence[Any]) -> tuple[int, ...] | None:
        """The extent of a quantized block; None for a value that has none."""
        return block_of(value.shape, tuple(spec), self.mesh, self.axis, self.sent.weights)

    def _as_codes(
        self,
        value: jax.Array,
        spec: Sequence[Any],
        block: Sequence[int],
        gather: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """What is gathered of a value as codes and scales."""
        assert self.sent.weights is not None
        form = self.sent.weights.format
        codes, scales = map(gather, quantize(self.placed(value, spec), block, form))
        return dequantize(codes, scales, form, value.dtype)

    def secondary(
        self, value: jax.Array, spec: Sequence[Any], partly: Spec, *, quantized: bool = False
    ) -> jax.Array:
        """All-gathers a shard between partitions, to be gathered within one later: a barrier keeps
        XLA from gathering at once."""
        if quantized and (block := self._block(value, spec)) is not None:
            return self._as_codes(value, spec, block, lambda x: self.secondary(x, spec, partly))
        pinned = self.placed(value, spec)
        with self.ledger.gathers(pinned, spec, partly):
            pinned = self.placed(pinned, partly)
        return self.placed(lax.optimization_barrier(pinned), partly)

    def gather(self, shard: Shard, scope: Scope, rest: Sequence[Any]) -> jax.Array:
        """One parameter whole, for a use beside the operands ``rest``.

        A scope that shares gathers has one of each parameter."""
        shard = scope.as_filled(shard)
        if shard.whole is not None:
            return shard.whole
        how = shard.gathering
        if how.narrow is not None:  # half the bytes, or less
            return how.narrow.widen(self.gather(how.narrow.shard, scope, rest))
        gathered = scope.gathered if scope.adjacent is None else scope.adjacent
        if id(shard) in gathered:
            return gathered[id(shard)][1]
        if how.host:
            whole = self.whole(fetched(shard.value), shard.spec, quantized=how.quantized)
            if scope.share:
                scope.gathered[id(shard)] = shard, whole
            return whole
        value = shard.value if scope.window is None else scope.window.after(shard)
        if not scope.share:
            if id(shard) in scope.seen and scope.token is not None:
                value, _ = lax.optimization_barrier((value, scope.token))
            scope.seen[id(shard)] = shard
            scope.token = next(
                (x for x in rest if not isinstance(x, Shard) and jnp.ndim(x)), scope.token
            )
        whole = self.whole(value, shard.spec, quantized=how.quantized)
        if scope.share or scope.adjacent is not None:
            gathered[id(shard)] = shard, whole
        return whole

    def scatter(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """Makes a gradient its shard: the sum over the devices becomes a reduce-scatter, and
        between replica groups an all-reduce of the shards.

        Without groups through the whole gradient: otherwise XLA shards what the gradient is made
        from as well, and gathers every device's activations or cotangents for it. With groups
        straight: otherwise XLA all-reduces the whole gradient over all of them. A vector, which is
        little, is the sum of an activation, not a product: XLA would move that.
        """
        if self.replicas > 1 and len(spec) > 1:
            return self.scatter_parts(gradient, spec)
        return self.scatter_whole(gradient, spec)

    def scatter_whole(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """The same through the whole gradient, unless parts of the axis share the gradient. A mesh
        of parts is another one to XLA, which shards nothing else by it."""
        if len(layout.parts_of(spec, self.axis)) < 2:
            gradient = self.constrain(gradient, layout.without(spec, self.axis))
        return self.scatter_parts(gradient, spec)

    def scatter_parts(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """The same straight, over one part of the axis more at a time: XLA all-reduces the whole
        gradient to cut two at once. The inner parts come first, so that least is sent between
        hosts."""
        shard, parts = layout.without(spec, self.axis), layout.parts_of(spec, self.axis)
        uneven = layout.padded(gradient.shape, spec, self.mesh) != gradient.shape
        if not parts or uneven:  # XLA cuts the sum then
            with self.ledger.reduces(gradient, shard, shard):
                for dimension, name in parts:
                    shard = layout.within(shard, dimension, name)
                    gradient = self.constrain(gradient, shard)
                return gradient if parts else self.constrain(gradient, shard)
        over = self.ledger.over(layout.parts(name, self.mesh) for _, name in parts)
        for (dimension, name), n in zip(parts, over, strict=True):
            before, shard = shard, layout.within(shard, dimension, name)
            partly = name != parts[-1][1]
            with self.ledger.reduces(gradient, before, shard, over=n, partly=partly):
                gradient = self.constrain(gradient, shard)
        return gradient

    def scatter_table(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """The same for the gradient of a lookup, which XLA sums over all devices at once: it is
        reduce-scattered in their order, and pieces change places then."""
        parts = layout.parts_of(spec, self.axis)
        if len(parts) > 1 and len({d for d, _ in parts}) == 1:
            whole = layout.without(spec, self.axis)
            flat = whole
            for dimension, name in reversed(parts):
                flat = layout.within(flat, dimension, name)
            gradient = self.constrain(gradient, whole)
            with self.ledger.reduces(gradient, whole, flat):
                gradient = self.constrain(gradient, flat)
            return self.constrain(gradient, spec)
        return self.scatter(gradient, spec)

    def on_device(self, v: Shard, scope: Scope) -> Any:
        """Brings a parameter from host memory to the device: as a shard, or whole."""
        if layout.without(v.spec, self.axis) == v.spec:
            return self.gather(v, scope, ())
        return v.with_value(self.constrain(fetched(v.value), v.spec))

    def all_whole(self, values: Sequence[Any], scope: Scope) -> list[Any]:
        """Operands of one equation, the shards among them gathered."""
        return [self.gather(v, scope, values) if isinstance(v, Shard) else v for v in values]

    def all_known(self, values: Sequence[Any], scope: Scope) -> list[Any]:
        """The same for the shards that were gathered in advance; at stages 1 and 2 for all but
        those that were gathered rounded, and those that a loop gathers."""
        if self.keep:
            return [
                self.gather(v, scope, values)
                if isinstance(v, Shard) and not v.is_rounded and not v.gathering.by_loop
                else v
                for v in values
            ]
        return [v.whole if is_whole(v) else v for v in values]


def is_sharded(spec: Spec, axis: str) -> bool:
    """Whether a spec names the shard axis."""
    return layout.without(spec, axis) != spec


def is_whole(value: Any) -> bool:
    """Whether ``value`` is a shard that was gathered in advance."""
    return isinstance(value, Shard) and value.whole is not None


def plain(value: Any) -> Any:
    """The array of a shard, as it lies."""
    return value.value if isinstance(value, Shard) else value
