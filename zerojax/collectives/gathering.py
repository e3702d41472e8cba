"""All-gathers of shards where they are used, and reductions of gradients to shards."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.collectives.host import Host, fetch_to_device
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.order import AHEAD, Window
from zerojax.collectives.quantization import decode, dequantize, encode, quantize, rounded
from zerojax.collectives.shard import ReducedGradient, Shard
from zerojax.devices.mesh import REPLICA, batch_axes, batch_devices, sequence_size
from zerojax.devices.network import near
from zerojax.graph.rows import RowDimensions
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.plan.quantized import E4M3, UNQUANTIZED, Format, Sent, block_of
from zerojax.plan.rule import SMALL
from zerojax.trace import marks
from zerojax.xla import jaxprs
from zerojax.xla.types import Atom, Equation

T = TypeVar("T")

# By the name of a mark, the function that replaces the mark: from its operand to its result.
Replacements = Mapping[str, Callable[[jax.Array], jax.Array]]

AllRows = dict[int, tuple[jax.Array, jax.Array | None]]
"""By ``id`` of an array of activations, the array, and all its rows unless they were dropped."""


MOST = 1_000_000_000
"""The most elements of parameters, and of their gradients, that one loop holds unsharded:
DeepSpeed's default of ``stage3_max_live_parameters``."""


@dataclass(frozen=True)
class Thresholds:
    """Numbers of elements on which the decisions about parameters depend.

    Attributes:
      held: The most elements of parameters, and of their gradients, that one loop gathers before
        its first iteration, and reduces after the last one.
      ahead: The fewest elements of parameters between a use and the gathers that wait for it, see
        :mod:`zerojax.collectives.order`.
      in_place: The fewest elements of a weight that stays sharded in its products, see
        :mod:`zerojax.collectives.sharded_products`: a smaller one is gathered in hardly more time
        than any collective takes.
      small: The most elements of a parameter that is gathered with others, once a step.
      away: The fewest elements per device of a residual of a rematerialised block in a loop that
        waits in host memory for the backward pass; None keeps all residuals on the device.
    """

    held: int = MOST
    ahead: int = AHEAD
    in_place: int = 2**20
    small: int = SMALL
    away: int | None = None


class Pass(NamedTuple):
    """A forward or a backward pass.

    Attributes:
      is_backward: Whether it is a backward pass.
      reused: By ``id`` of a shard whose unsharded array serves several uses of the pass, its size.
      sums: The partial sums of gradients, for which the next block waits.
    """

    is_backward: bool
    reused: Mapping[int, int]
    sums: Sequence[object] = ()


@dataclass(eq=False)
class Emitted:
    """Arrays that later equations of a scope share, or wait for.

    Attributes:
      gathered: By ``id`` of a shard that was gathered, the shard, and what is kept of it: the
        unsharded array, the gathered version of a stack that a loop has gathered, or nothing.
      token: An array operand of the last use that gathered; the next gather of the same shard waits
        for the array.
      rows: The rows last looked up in a gathered table; the gather of the next such table waits for
        them.
      all_rows: The activations that products with sharded weights gathered, oldest first.
      reduced: The gradients of each block of the backward pass, in order.
      cotangent: The cotangent of the last block of the backward pass that was held back.
      current: The pass to which the last use of a shard belongs.
      moved: By ``id`` of a shard and by the equation that casts it or changes its layout, the shard
        and the result.
    """

    gathered: dict[int, tuple[Shard, jax.Array | Shard | None]] = field(default_factory=dict)
    token: jax.Array | None = None
    rows: jax.Array | None = None
    all_rows: AllRows = field(default_factory=dict)
    reduced: list[list[ReducedGradient]] = field(default_factory=list)
    cotangent: jax.Array | None = None
    current: Pass = field(default_factory=lambda: Pass(False, {}))
    moved: dict[tuple[int, str, str], tuple[Shard, Shard]] = field(default_factory=dict)

    def begin_pass(self, *, is_backward: bool) -> None:
        """Drops the unsharded arrays at the border between a forward and a backward pass, through
        which they would take as much memory as all parameters."""
        if is_backward != self.current.is_backward:
            self.current = Pass(is_backward, {})
            self.gathered = {
                key: (shard, kept if isinstance(kept, Shard) else None)
                for key, (shard, kept) in self.gathered.items()
            }

    def reuse(self, shard: Shard, most: int) -> jax.Array | None:
        """Returns the unsharded array of a shard for a further use in the same pass; None if it was
        not gathered in the pass, or if several arrays of more than ``most`` elements would stay
        unsharded."""
        copy = self.copy_of(shard)
        if copy is None:
            return None
        reused = {**self.current.reused, id(shard): copy.size}
        if len(reused) > 1 and sum(reused.values()) > most:
            return None
        self.current = self.current._replace(reused=reused)
        return copy

    def copy_of(self, shard: Shard) -> jax.Array | None:
        """Returns the unsharded array of a shard that was gathered in the scope and kept."""
        _, kept = self.gathered.get(id(shard), (shard, None))
        return None if isinstance(kept, Shard) else kept

    def as_filled(self, value: T) -> Shard | T:
        """Returns the gathered version of ``value`` if a loop in the scope has gathered it."""
        _, kept = self.gathered.get(id(value), (value, None))
        return kept if isinstance(kept, Shard) else value


@dataclass(frozen=True, eq=False)
class Scope:
    """The part of a program within which one gather of a parameter may serve several uses.

    One iteration of a loop or one rematerialised block: the gathered parameter is freed at its end.
    The body of the step shares gathers at stage 3 only within a pass. The backward pass gathers
    anew, separated from the forward pass by a barrier, so that no parameter stays gathered.

    Attributes:
      share: Whether one gather serves all uses in the scope, and not only those of a pass.
      replace: The functions that replace marks.
      host: The way in which gradients are sent to host memory; None if they stay on the devices.
      window: Delays gathers outside loops over stacks; None if gathers are not delayed.
      row_dims: The dimensions along which rows of the batch lie.
      defers: Whether loops directly in the scope reduce gradients one iteration later; only in the
        scope of the step's body.
      row_sums: By variable, the sums in the scope that are not yet added up over the devices.
      used_unsharded: By ``id``, the shards that a use other than a lookup needs unsharded.
      of_layer: Whether the scope is one layer, in a loop over layers.
      of_step: Whether the scope is one of several updates, an iteration or a branch.
      backward: Whether an equation around the scope belongs to the backward pass: equations in a
        loop's body do not say so themselves.
      emitted: What has been gathered and reduced in the scope.
    """

    share: bool
    replace: Replacements = field(default_factory=dict)
    host: Host | None = None
    window: Window | None = None
    row_dims: RowDimensions = field(default_factory=RowDimensions)
    defers: bool = False
    row_sums: Mapping[Atom, Any] = field(default_factory=dict)
    used_unsharded: frozenset[int] = frozenset()
    of_layer: bool = False
    of_step: bool = False
    backward: bool = False
    emitted: Emitted = field(default_factory=Emitted)

    def inner(
        self,
        row_sums: Mapping[Atom, Any] | None = None,
        *,
        of_layer: bool = False,
        of_step: bool = False,
        share: bool = True,
        window: Window | None = None,
    ) -> Scope:
        """Returns the scope of a loop's iteration or of a block, with its own partial sums."""
        return Scope(
            share=share,
            replace=self.replace,
            host=self.host,
            window=window,
            row_dims=self.row_dims,
            row_sums=row_sums or {},
            of_layer=of_layer or self.of_layer,
            of_step=of_step,
            backward=self.backward,
        )

    def within(self, eqn: Equation) -> Scope:
        """Returns the scope for a program inside an equation."""
        backward = self.computes_gradients(eqn)
        return self if backward == self.backward else replace(self, backward=backward)

    def computes_gradients(self, eqn: Equation) -> bool:
        """Returns whether an equation belongs to the backward pass, and computes no value of the
        forward pass again."""
        is_backward = jaxprs.is_transposed(eqn) or jaxprs.runs_backward(eqn)
        return (self.backward or is_backward) and not jaxprs.is_recomputed(eqn)

    def replaces(self, eqn: Equation) -> bool:
        """Returns whether an equation is, or contains, a mark that is replaced."""
        return any(marks.holds(eqn, name) for name in self.replace)


class Gatherer:
    """Gathers of parameters and reductions of gradients over one axis of a mesh.

    Args:
      mesh: the mesh of all specs.
      axis: the axis over which ZeRO shards.
      keep: True gathers each parameter once and keeps it (stages 1 and 2), False gathers where
        used, drops after the pass, and gathers again (stage 3).
      sent: The formats in which parameters and gradients are sent.
      thresholds: The sizes on which decisions depend.

    Attributes:
      sent_unquantized: Large gradients that are sent unquantized despite the config: the path of
        the leaf, if known, else the primitive that produces the gradient; and the shape.
      multiplied: The paths, within the parameters, of those that products multiply in fp8.
      ledger: Records the collectives.
    """

    mesh: Mesh
    axis: str
    keep: bool
    sent: Sent
    thresholds: Thresholds
    replicas: int
    ledger: Ledger

    def __init__(
        self,
        mesh: Mesh,
        axis: str,
        *,
        keep: bool,
        sent: Sent = UNQUANTIZED,
        thresholds: Thresholds | None = None,
    ) -> None:
        self.thresholds = thresholds or Thresholds()
        self.mesh, self.axis, self.keep, self.sent = mesh, axis, keep, sent
        self.replicas = mesh.shape.get(REPLICA, 1)
        self._lane_axes: frozenset[str] = frozenset()
        self.sent_unquantized: list[str] = []
        self.multiplied: set[str] = set()
        self.ledger = Ledger(mesh)

    def on_lanes(self, axes: Sequence[str]) -> Self:
        """Returns a gatherer for a program that runs on lanes, see
        :mod:`zerojax.accumulation.lanes`: it constrains nothing along their ``axes``, and sums over
        no replica groups."""
        for_lanes = copy.copy(self)
        # jax.vmap refuses constraints to the axes of its spmd_axis_name, along which the lanes lie.
        for_lanes.replicas, for_lanes._lane_axes = 1, frozenset(axes)
        for_lanes.ledger = self.ledger.on_lanes(axes)
        return for_lanes

    def deferring_reductions(self) -> Self:
        """Returns a gatherer for a loop over micro-batches, after which XLA moves the reductions:
        its ledger records no reduction."""
        other = copy.copy(self)
        other.ledger = self.ledger.without_reductions()
        return other

    @property
    def lanes_on_axis(self) -> bool:
        """True if lanes run along the shard axis: only parameters are sharded over the axis then,
        not the values that each lane computes."""
        return self.axis in self._lane_axes

    @property
    def sums_own_rows(self) -> bool:
        """True if each of several devices sums over its own rows or tokens: not if devices share a
        dimension of the model, and not on lanes."""
        sharing = batch_devices(self.mesh) * sequence_size(self.mesh)
        return sharing == self.mesh.size > 1 and not self._lane_axes

    @property
    def near(self) -> int:
        """The number of devices along the axis in one host, over which quantized gradients are
        summed first; 1 if the number differs between hosts."""
        return near(self.mesh, self.axis)

    def bind(self, eqn: Equation, values: Sequence[object]) -> Sequence[Any]:
        """Runs an equation on other operands; returns its results."""
        return jaxprs.bind(eqn, values)

    def constrain(self, value: jax.Array, spec: Sequence[SpecEntry]) -> jax.Array:
        """Constrains ``value`` to a spec; on lanes, returns ``value`` unchanged if the spec names
        an axis of the lanes."""
        if not self._lane_axes.isdisjoint(name for entry in spec for name in layout.axes(entry)):
            return value
        return self.constrain_always(value, spec)

    def constrain_always(self, value: jax.Array, spec: Sequence[SpecEntry]) -> jax.Array:
        """Constrains ``value`` to a spec, on lanes too: for a parameter, or a value computed from
        parameters only, which all lanes have in common and their axes may shard."""
        return lax.with_sharding_constraint(value, layout.sharding(self.mesh, spec))

    def by_rows(self, value: Any, at: int = 0) -> Any:
        """Shards the rows of an array, along dimension ``at``, over the batch axes. Returns other
        values, and arrays whose rows do not divide among the devices, unchanged."""
        is_numeric = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.number)
        if self._lane_axes or not is_numeric or value.ndim <= at:
            return value
        if value.shape[at] % batch_devices(self.mesh):
            return value
        # None would replicate the other dimensions; XLA keeps the sharding that it chose for them.
        entries: list[object] = [PartitionSpec.UNCONSTRAINED] * value.ndim
        entries[at] = batch_axes(self.mesh)
        sharding = NamedSharding(self.mesh, PartitionSpec(*entries))
        return lax.with_sharding_constraint(value, sharding)

    def all_gather(
        self, value: jax.Array, spec: Sequence[SpecEntry], *, quantized: bool = False
    ) -> jax.Array:
        """All-gathers a shard over the shard axis; if ``quantized``, its codes and scales, whose
        gathers XLA combines."""
        if quantized and (block := self._block(value, spec)) is not None:
            return self._as_codes(value, spec, block, lambda x: self.all_gather(x, spec))
        # Otherwise XLA may move the cast that produced the shard past the gather, and send twice
        # the bytes.
        pinned = self.constrain_always(value, spec)
        # Outermost part first: XLA starts with the innermost, and sends that result between hosts.
        parts = layout.parts_of(spec, self.axis)[-2::-1]
        intermediate = [layout.inside(spec, self.axis, layout.before(part)) for _, part in parts]
        with self.ledger.of(spec):
            for less in (*intermediate, layout.without(spec, self.axis)):
                self.ledger.gathers(pinned, spec, less)
                pinned, spec = self.constrain_always(pinned, less), less
        return pinned

    def gather_codes(self, codes: jax.Array, spec: Sequence[SpecEntry]) -> jax.Array:
        """All-gathers the fp8 codes of a matrix, which products read."""
        with self.ledger.computes(codes.dtype.name):
            return self.all_gather(codes, spec)

    def rounded(self, x: jax.Array, format: Format, rows: Sequence[int]) -> jax.Array:
        """Rounds an operand of a product to fp8: each device its own rows, along the first of the
        dimensions ``rows`` that divides, with a scale of their own."""
        own = functools.partial(rounded, format=format)
        even = [d for d in rows if x.shape[d] % batch_devices(self.mesh) == 0]
        if self._lane_axes or not even:
            return own(x)
        spec = PartitionSpec(*(None,) * even[0], batch_axes(self.mesh))
        run = jax.shard_map(own, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return run(x)

    def _block(self, value: jax.Array, spec: Sequence[SpecEntry]) -> tuple[int, ...] | None:
        """Returns the extent of a quantized block in each dimension; None without blocks."""
        return block_of(value.shape, tuple(spec), self.mesh, self.axis, self.sent.weights)

    def _as_codes(
        self,
        value: jax.Array,
        spec: Sequence[SpecEntry],
        block: Sequence[int],
        gather: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Quantizes a value, applies ``gather`` to codes and scales, and dequantizes the result."""
        assert self.sent.weights is not None
        form = self.sent.weights.format
        codes, scales = map(gather, quantize(self.constrain_always(value, spec), block, form))
        return dequantize(codes, scales, form, value.dtype)

    def secondary(
        self, value: jax.Array, spec: Sequence[SpecEntry], partly: Spec, *, quantized: bool = False
    ) -> jax.Array:
        """All-gathers a shard between partitions; a later gather within a partition completes
        it."""
        if quantized and (block := self._block(value, spec)) is not None:
            return self._as_codes(value, spec, block, lambda x: self.secondary(x, spec, partly))
        pinned = self.constrain_always(value, spec)
        with self.ledger.of(spec):
            self.ledger.gathers(pinned, spec, partly)
        pinned = self.constrain_always(pinned, partly)
        # Without the barrier XLA may gather over both at once. Without the constraint after it, the
        # temporaries of a GPT of 3 layers with hpZ over 4 of 8 H100s take 55 MB for 43.
        return self.constrain_always(lax.optimization_barrier(pinned), partly)

    def gather(self, shard: Shard, scope: Scope, rest: Sequence[Any]) -> jax.Array:
        """Returns one parameter unsharded, for a use beside the operands ``rest``.

        In a scope that shares gathers, each parameter is gathered once; elsewhere once a pass."""
        emitted = scope.emitted
        shard = emitted.as_filled(shard)
        if shard.unsharded is not None:
            return shard.unsharded
        gathering = shard.gathering
        if gathering.narrow is not None:  # half the bytes, or less
            return gathering.narrow.widen(self.gather(gathering.narrow.shard, scope, rest))
        copy = (
            emitted.copy_of(shard) if scope.share else emitted.reuse(shard, self.thresholds.ahead)
        )
        if copy is not None:
            return copy
        unsharded = self.send(shard, scope, rest)
        emitted.gathered[id(shard)] = shard, unsharded
        return unsharded

    def send(self, shard: Shard, scope: Scope, rest: Sequence[Any]) -> jax.Array:
        """All-gathers one parameter for :meth:`gather`, from host memory or from the devices."""
        emitted, gathering = scope.emitted, shard.gathering
        if gathering.host:
            value = fetch_to_device(shard.value)
        else:
            value = shard.value if scope.window is None else scope.window.after(shard)
        if not gathering.host and not scope.share:
            if id(shard) in emitted.gathered and emitted.token is not None:
                # XLA would merge this gather with that of the earlier use, and keep the result in
                # between: for a parameter of the forward pass, until the backward pass.
                value, _ = lax.optimization_barrier((value, emitted.token))
            emitted.token = next(
                (x for x in rest if not isinstance(x, Shard) and jnp.ndim(x)), emitted.token
            )
        if gathering.scale is None:
            return self.all_gather(value, shard.spec, quantized=gathering.quantized)
        codes = encode(value, gathering.scale, E4M3)
        return decode(self.gather_codes(codes, shard.spec), gathering.scale, value.dtype)

    def scatter(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """Reduces a gradient to its shard: the sum over the devices becomes a reduce-scatter, and
        between replica groups an all-reduce of the shards."""
        # Constrained in full first, XLA all-reduces over all groups: 31 MB for 9 of a GPT of 3
        # layers on 2 groups of 4. Not a vector, which is the sum of an activation: constrained to
        # its shard, it would have XLA move the activation.
        if self.replicas > 1 and len(spec) > 1:
            return self.scatter_parts(gradient, spec)
        return self.scatter_unsharded(gradient, spec)

    def scatter_unsharded(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """Constrains the full gradient, and then reduces it to its shard."""
        # XLA takes a mesh of parts for another mesh, and shards no operand by it. In full first, it
        # would all-reduce: 11.3 MB for 5.6 of three 1000 x 1000 matrices on 16 devices.
        if len(layout.parts_of(spec, self.axis)) < 2:
            # Otherwise XLA may shard the operands of the gradient as well, and gather every
            # device's activations or cotangents, or reduce in each iteration of a loop.
            gradient = self.constrain(gradient, layout.without(spec, self.axis))
        return self.scatter_parts(gradient, spec)

    def scatter_parts(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """Reduce-scatters a gradient over one part of the axis at a time, without a constraint of
        the full gradient."""
        shard, parts = layout.without(spec, self.axis), layout.parts_of(spec, self.axis)
        uneven = layout.padded_shape(gradient.shape, spec, self.mesh) != gradient.shape
        sizes = [layout.parts(name, self.mesh) for _, name in parts]
        with self.ledger.of(spec):
            if not parts or uneven:  # XLA all-reduces and slices the sum
                self.ledger.reduces(gradient, shard, shard)
                gradient = gradient if parts else self.constrain(gradient, shard)
            # XLA all-reduces a gradient that one constraint splits over two parts. Inner parts come
            # first, so that the fewest bytes are sent between hosts.
            for (dimension, name), n in zip(parts, self.ledger.over(sizes, spec), strict=False):
                before, shard = shard, layout.within(shard, dimension, name)
                if not uneven:
                    self.ledger.reduces(gradient, before, shard, over=n)
                gradient = self.constrain(gradient, shard)
        return gradient

    def scatter_table(self, gradient: jax.Array, spec: Spec) -> jax.Array:
        """Reduces the gradient of a lookup to its shard."""
        parts = layout.parts_of(spec, self.axis)
        if len(parts) > 1 and len({d for d, _ in parts}) == 1:
            full_spec = layout.without(spec, self.axis)
            # XLA sums such a gradient over all devices at once: it is reduce-scattered in their
            # order, and the devices then exchange shards.
            flat_spec = full_spec
            for dimension, name in reversed(parts):
                flat_spec = layout.within(flat_spec, dimension, name)
            gradient = self.constrain(gradient, full_spec)
            with self.ledger.of(spec):
                self.ledger.reduces(gradient, full_spec, flat_spec)
            gradient = self.constrain(gradient, flat_spec)
            return self.constrain(gradient, spec)
        return self.scatter(gradient, spec)

    def on_device(self, v: Shard, scope: Scope) -> Shard | jax.Array:
        """Brings a parameter from host memory to the device: as a shard, or unsharded if its spec
        is without the shard axis."""
        if layout.without(v.spec, self.axis) == v.spec:
            return self.gather(v, scope, ())
        return v.with_value(self.constrain(fetch_to_device(v.value), v.spec))

    def gather_all(self, values: Sequence[Shard | T], scope: Scope) -> list[jax.Array | T]:
        """Returns the operands of one equation, with the shards among them gathered."""
        return [self.gather(v, scope, values) if isinstance(v, Shard) else v for v in values]

    def all_known(self, values: Sequence[object], scope: Scope) -> list[Any]:
        """Returns operands with unsharded arrays in place of the shards that were gathered in
        advance, but for those that products multiply in fp8; at stages 1 and 2 in place of all
        shards except those that were gathered in a narrower dtype, and those that a loop
        gathers."""
        if self.keep:
            return [
                self.gather(v, scope, values)
                if isinstance(v, Shard) and not v.is_rounded and not v.gathering.by_loop
                else v
                for v in values
            ]
        return [v.unsharded if is_gathered(v) and not v.in_fp8 else v for v in values]


def is_sharded(spec: Spec, axis: str) -> bool:
    """Returns whether a spec names the shard axis."""
    return layout.without(spec, axis) != spec


def is_on_devices(value: object, axis: str) -> TypeGuard[Shard]:
    """Returns whether ``value`` is sharded over the shard axis, and not in host memory."""
    return isinstance(value, Shard) and is_sharded(value.spec, axis) and not value.gathering.host


def is_gathered(value: object) -> TypeGuard[Shard]:
    """Returns whether ``value`` is a shard that was gathered in advance, in its own dtype."""
    return isinstance(value, Shard) and value.unsharded is not None


def plain(value: Shard | T) -> jax.Array | T:
    """Returns the sharded array of a shard; other values unchanged."""
    return value.value if isinstance(value, Shard) else value
