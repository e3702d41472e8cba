"""The rule by which ZeRO shards an array over the shard axis.

1. The user's spec is kept. If it names the shard axis, the rule adds nothing.
2. An array below the persistence threshold is replicated.
3. The rule shards the largest dimension that the axis divides, preferably one that the user's spec
   leaves free; otherwise it shards the slices of a dimension of the user's again.
4. If the axis divides no dimension, two dimensions share the axis by its factors, provided that
   the factors divide them: 1600 x 1600 over 1024 devices is 32 x 32 shards.
5. Otherwise one dimension, or one of two, is padded with zeros at rest: 4096 over 24 devices is 24
   shards of 171. The rule pads with the least waste of memory, or with hardly more if that pads a
   smaller dimension.
6. An array of at most 8192 elements (``small_array_size``) is not padded: the largest part of the
   axis that divides one or two dimensions shards them, and the array is replicated over the rest.
   An array below 1024 elements (``TINY``) is not split by factors: it is replicated over all of the
   axis if the axis divides no dimension.

Partitions (hpZ) change the order of the shards, and the rule prefers cuts that allow the change:
the n-th devices of all partitions together hold a contiguous slice, and the slices of the devices
of one partition are adjacent. A gather between partitions only then yields a secondary shard.

The first of three or more dimensions usually counts the layers of a stack, of which a step takes
one at a time. The rule does not shard it if it is not the largest and another can be sharded.

Sizes are those of one device's shard under the user's spec; only the persistence threshold counts
the elements of the global array. An array that is replicated, over all of the axis or over a part
of it, has a reason, which the plan prints.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.devices.mesh import REPLICA, axis_size, joined_axes, sequence_size, zero_axis
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SubAxis
from zerojax.plan.places import offloads

SMALL = ZeroConfig.small_array_size
"""Elements of the largest array that is not padded, unless the config says otherwise."""

TINY = 1024
"""Elements of the smallest array for which dimensions share an axis by its factors."""

_NEAR = 1.02
"""The memory, relative to the least, that an array may take if its padding then costs less time."""


class ShardSpec(NamedTuple):
    """The sharding of an array by the rule.

    Attributes:
      spec: One entry a dimension, the user's axes included. If an entry does not divide its
        dimension, the dimension is padded at rest.
      reason: Why the array is not sharded over all of the shard axis; empty if it is.
      n_copies: Devices that hold the same elements, for want of a dimension that divides; 1
        for any other reason.
    """

    spec: Spec
    reason: str
    n_copies: int = 1


class Cut(NamedTuple):
    """A way to shard an array: pairs of a dimension and its number of slices. Several dimensions
    share the axis, the first outermost."""

    slices: tuple[tuple[int, int], ...]

    def share(self, shard_shape: Sequence[int]) -> int:
        """Returns the most elements of a shard that the cut leaves on one device."""
        by_dimension = dict(self.slices)
        return math.prod(-(-size // by_dimension.get(d, 1)) for d, size in enumerate(shard_shape))

    def exact(self, shard_shape: Sequence[int]) -> bool:
        """Returns whether the cut needs no padding."""
        return all(shard_shape[d] % n == 0 for d, n in self.slices)

    def inner(self, partition: int) -> list[int]:
        """Returns the number of slices of each cut dimension among the devices of a partition."""
        remaining, sizes = partition, []
        for _, k in reversed(self.slices):
            sizes.append(math.gcd(k, remaining))
            remaining //= sizes[-1]
        return sizes[::-1]

    def nests(self, shard_shape: Sequence[int], partition: int) -> bool:
        """Returns whether a partition's devices can hold equal secondary shards without padding."""
        inner = self.inner(partition)
        return math.prod(inner) == partition and all(
            k == 1 or shard_shape[d] % n == 0 for k, (d, n) in zip(inner, self.slices, strict=True)
        )

    def padded(self, shard_shape: Sequence[int]) -> int:
        """Returns the summed extents of the padded dimensions. Padding copies the activations from
        which a gradient is computed, rows of such a dimension."""
        return sum(shard_shape[d] for d, n in self.slices if shard_shape[d] % n)


def shard_spec(
    shape: Sequence[int],
    own: Spec,
    mesh: Mesh,
    config: ZeroConfig,
    *,
    parts: bool = True,
) -> ShardSpec:
    """Applies the rule to one array.

    Args:
      shape: The global shape of the array.
      own: The user's spec, one entry a dimension, without axes of size 1, which shard nothing.
      mesh: The devices.
      config: The stage, the thresholds on elements, and the devices of a partition.
      parts: Whether dimensions may share the axis by its factors; never with offload.

    Example:
      >>> import zerojax
      >>> config = ZeroConfig(stage=2)
      >>> shard_spec((6, 16), (None, None), zerojax.mesh(), config).spec
      (None, 'data')
      >>> shard_spec((30, 50), (None, None), zerojax.mesh(), config)
      ShardSpec(spec=('data:(2)2', 'data:(4)2'), reason='(30, 50) divides by 4 of 8', n_copies=2)
    """
    if config.stage == 0:
        return ShardSpec(own, "stage 0 replicates the state")
    axis, small = zero_axis(mesh), config.small_array_size
    n = axis_size(mesh, axis)
    if any(axis in layout.axes(entry) for entry in own):
        return ShardSpec(own, f"its own spec takes the {axis!r} axis")
    if n == 1:
        return ShardSpec(own, f"the {axis!r} axis has one device")
    # As in DeepSpeed, the threshold counts elements of the whole parameter. Below stage 3 the step
    # gathers parameters once anyway, and moments of any size are sharded.
    smallest = config.stage3_param_persistence_threshold if config.stage == 3 else 0
    if math.prod(shape) < smallest:
        reason = f"below stage3_param_persistence_threshold ({smallest:,} elements)"
        return ShardSpec(own, reason)
    parts = parts and not offloads(config)  # offload streams sub-groups as rows on one mesh
    partition = config.zero_hpz_partition_size if 1 < config.zero_hpz_partition_size < n else 1
    shard_shape = layout.shard_shape(shape, own, mesh)
    free = tuple(d for d, entry in enumerate(own) if entry is None)
    cut = _single(shard_shape, free, n, small)
    if cut is None and math.prod(shard_shape) <= small:
        cut = _exact(shard_shape, free, n, parts and math.prod(shard_shape) >= TINY)
    elif cut is None:
        cut = _best(shard_shape, free, n, parts, partition)
    n_slices = math.prod(k for _, k in cut.slices)
    reason = ""
    if n_slices < n:
        described = f"{tuple(shape)}"
        if shard_shape != tuple(shape):
            described = f"{shard_shape}, a shard of {described},"
        reason = f"{described} divides by {n_slices} of {n}"
        if n_slices == 1:
            reason = f"no dimension of {described} is divisible by {n}"
    nests = cut.nests(shard_shape, partition)
    # With fewer elements than devices, copies are not for want of a dimension.
    n_copies = n // n_slices if math.prod(shard_shape) >= n else 1
    spec = _spec(own, cut, axis, n, partition if nests else 1)
    # On a joined axis, a part may fall across the border between two axes of the mesh.
    if parts and not layout.separable(spec, mesh):
        return shard_spec(shape, own, mesh, config, parts=False)
    return ShardSpec(spec, reason, n_copies)


def is_small(shape: Sequence[int], spec: Spec, axis: str, small: int = SMALL) -> bool:
    """Returns whether a parameter of this shape is gathered with others, once a step.

    A parameter of more than ``small`` elements is not, nor is one that is sharded over a second
    axis, or along two dimensions.
    """
    named = [entry for entry in spec if entry is not None]
    only_axis = len(named) == 1 and all(layout.full_axis(a) == axis for a in layout.axes(named[0]))
    return math.prod(shape) <= small and only_axis


def _single(shard_shape: Sequence[int], free: Sequence[int], n: int, small: int) -> Cut | None:
    """Cuts the largest dimension that the full axis divides; None if there is none."""
    divisible = [d for d, size in enumerate(shard_shape) if size and size % n == 0]
    divisible = [d for d in divisible if not _is_stack(shard_shape, d)] or (
        divisible if math.prod(shard_shape) <= small else []
    )
    chosen = [d for d in divisible if d in free] or divisible
    return Cut(((max(chosen, key=lambda d: shard_shape[d]), n),)) if chosen else None


@functools.cache
def _exact(shard_shape: tuple[int, ...], free: tuple[int, ...], n: int, parts: bool) -> Cut:
    """Finds the cut without padding that leaves each device the fewest elements."""
    cuts = [cut for cut in _cuts(free, n, parts, partly=True) if cut.exact(shard_shape)]
    return min([Cut(()), *cuts], key=lambda cut: (cut.share(shard_shape), len(cut.slices)))


# Cached, as models repeat a few shapes in many layers.
@functools.cache
def _best(
    shard_shape: tuple[int, ...], free: tuple[int, ...], n: int, parts: bool, partition: int
) -> Cut:
    """Finds the cut that pads least, then the simplest, within ``_NEAR`` of the least memory."""
    cuts = [*_cuts(free, n, parts, partly=False)]
    cuts = [
        cut for cut in cuts if not any(_is_stack(shard_shape, d) for d, _ in cut.slices)
    ] or cuts
    if not cuts:
        return Cut(())
    cuts = [cut for cut in cuts if cut.nests(shard_shape, partition)] or cuts
    least = min(cut.share(shard_shape) for cut in cuts)
    most = _NEAR * max(least, math.prod(shard_shape) / n)

    def cost(cut: Cut) -> tuple[int, ...]:
        smallest_extent = min(shard_shape[d] // k for d, k in cut.slices)
        return cut.padded(shard_shape), len(cut.slices), -smallest_extent

    return min((cut for cut in cuts if cut.share(shard_shape) <= most), key=cost)


def _cuts(free: Sequence[int], n: int, parts: bool, partly: bool) -> Iterator[Cut]:
    """Yields cuts of one or two dimensions over the axis; if ``partly``, over parts of it too."""
    for n_slices in _divisors(n) if parts and partly else [n]:
        for d in free if n_slices > 1 else ():
            yield Cut(((d, n_slices),))
        for outer, inner in itertools.permutations(free, 2) if parts else ():
            for k in _divisors(n_slices):
                if 1 < k < n_slices:
                    yield Cut(((outer, k), (inner, n_slices // k)))


def _is_stack(shard_shape: Sequence[int], d: int) -> bool:
    """Returns whether a dimension counts the layers of a stack."""
    return d == 0 and len(shard_shape) > 2 and shard_shape[0] < max(shard_shape)


@functools.cache
def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _spec(own: Spec, cut: Cut, axis: str, n: int, partition: int) -> Spec:
    """Adds a cut to the user's spec.

    A cut over a part of the axis takes the innermost part, so that the devices that together hold
    the array are neighbours. The split among the devices of a partition is outermost in its
    dimension.
    """
    spec, outer = own, n // math.prod(k for _, k in cut.slices)
    inner = n // partition
    for (d, k), n_inner in zip(cut.slices, cut.inner(partition), strict=True):
        for before, size in ((inner, n_inner), (outer, k // n_inner)):
            if size > 1:
                name = axis if size == n else SubAxis(axis, before, size).name
                spec = layout.within(spec, d, name)
        inner, outer = inner * n_inner, outer * (k // n_inner)
    return spec


def check_own_spec(path: str, shape: Sequence[int], spec: Spec, mesh: Mesh) -> None:
    """Rejects a spec of the user's that does not fit the array or the mesh.

    Raises:
      ValueError: names the leaf, the axis and the remedy.
    """
    named = [a for entry in spec for a in layout.axes(entry)]
    of_zero = joined_axes(zero_axis(mesh)) if sequence_size(mesh) > 1 else ()
    of_zero = (*of_zero, *({REPLICA} & {*mesh.axis_names}))
    twice = [a for a in named if named.count(a) > 1]
    if len(spec) != len(shape):
        problem = f"does not fit its shape {tuple(shape)}: write at most one entry a dimension"
    elif twice:
        problem = f"names the axis {twice[0]!r} twice: remove one"
    elif taken := [a for a in named if a in of_zero]:
        problem = (
            f"names the axis {taken[0]!r}, over which zerojax itself places the state: remove it"
        )
    elif unknown := [a for a in named if a not in mesh.axis_names]:
        problem = (
            f"names the axis {unknown[0]!r}, but the mesh has {mesh.axis_names}: pass a mesh with "
            "that axis, map it in flax's logical axis rules, or pass zerojax.zero(..., "
            "specs=PartitionSpec()) to shard only over ZeRO's axis"
        )
    else:
        parts = [layout.parts(entry, mesh) for entry in spec]
        uneven = [d for d, n in enumerate(parts) if shape[d] % n]
        if not uneven:
            return
        d = uneven[0]
        problem = (
            f"does not fit: dimension {d} of {tuple(shape)} is not divisible by the {parts[d]} "
            f"devices of {spec[d]!r}; remove the axis, or pad the dimension"
        )
    raise ValueError(f"{path}: its PartitionSpec {spec} {problem}.")
