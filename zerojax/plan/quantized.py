"""The arrays that are sent in low-bit blocks, and the blocks (ZeRO++)."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.config import ConfigError, Fp8Config, ZeroConfig
from zerojax.devices.mesh import axis_size, batch_devices, zero_axis
from zerojax.devices.rates import kinds_with
from zerojax.plan import layout
from zerojax.plan.layout import Spec, SpecEntry
from zerojax.plan.leaf import Leaf
from zerojax.plan.rule import SMALL
from zerojax.plan.table import size
from zerojax.xla.compiler import GPUS

Format = Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"]

E4M3: Format = "float8_e4m3fn"
E5M2: Format = "float8_e5m2"

FLOAT8 = 8.9
"""The first compute capability of GPUs with fp8."""

PARAMS = "params"
"""The part of a path that leads to the parameters in a state; gradients have paths without it."""

BLOCK = 256
"""The fewest elements of a block without a set size: a scale is then 1.6% of its int8 codes."""


class Quantization(NamedTuple):
    """The format in which an array is sent.

    Attributes:
      format: The dtype of the codes.
      block_size: Elements of a block; None for about 256, a number that divides the array.
      small: Arrays of at most as many elements are sent unquantized.
    """

    format: Format
    block_size: int | None = None
    small: int = SMALL


class Sent(NamedTuple):
    """The formats in which sharded arrays are sent; None for unquantized.

    Attributes:
      weights: Of parameters that are sent in blocks.
      gradients: Of gradients.
      multiplied: The paths of the parameters that are sent as the fp8 codes that products read,
        within the parameters.
    """

    weights: Quantization | None = None
    gradients: Quantization | None = None
    multiplied: frozenset[str] = frozenset()

    def in_fp8(self, spec: object) -> bool:
        """Returns whether a spec is of parameters whose products run in fp8, or of gradients of
        such parameters."""
        paths = within_params(spec)
        return bool(paths) and paths <= self.multiplied


def within_params(spec: object) -> frozenset[str]:
    """Returns the paths that a spec carries, within the parameters; empty if it carries none."""
    return frozenset(path.removeprefix(PARAMS) for path in getattr(spec, "leaves", ()))


UNQUANTIZED = Sent()


def block_of(
    shape: Sequence[int], spec: Spec, mesh: Mesh, axis: str, how: Quantization | None
) -> tuple[int, ...] | None:
    """Returns the extent of a block in each dimension of an array; None if it has no blocks.

    A block is within one device's shard over all of ``axis``, even if ``spec`` names only a part of
    the axis: a secondary shard, gathered between partitions, has the same blocks when it is
    gathered within one partition.
    """
    if how is None or len(shape) < 2 or math.prod(shape) <= how.small:
        return None
    shard_shape = [
        _shard_extent(n, entry, mesh, axis) for n, entry in zip(shape, spec, strict=True)
    ]
    return extents(shard_shape, how.block_size)


def block_of_slice(
    shape: Sequence[int], n_slices: int, how: Quantization | None
) -> tuple[int, ...] | None:
    """Returns the block of an array in ``n_slices`` equal slices along its first dimension."""
    if how is None or len(shape) < 2 or math.prod(shape) <= how.small or shape[0] % n_slices:
        return None
    block = extents((shape[0] // n_slices, *shape[1:]), how.block_size)
    # Two int4 codes along the last dimension share a byte.
    return None if how.format == "int4" and block is not None and block[-1] % 2 else block


def _shard_extent(size: int, entry: SpecEntry, mesh: Mesh, axis: str) -> int:
    """Returns the extent of a device's shard; 1 if the shards are not equal."""
    names = layout.axes(entry)
    if any(layout.full_axis(name) == axis for name in names):
        others = tuple(name for name in names if layout.full_axis(name) != axis)
        n_slices = layout.parts(others, mesh) * axis_size(mesh, axis)
        if size % n_slices == 0:
            return size // n_slices
    n_slices = layout.parts(entry, mesh)
    return 1 if size % n_slices else size // n_slices


def extents(shard_shape: Sequence[int], block_size: int | None) -> tuple[int, ...] | None:
    """Returns the extent of a block in each dimension of one device's shard.

    A block fills the last dimension first. Without ``block_size`` a block has at least 256
    elements, and fewer than twice as many if the dimensions have such divisors. With ``block_size``
    a block has exactly that many elements; None if no such block divides the shard.

    Example:
      >>> extents((512, 4096), None), extents((4096, 172), None), extents((25, 1600), None)
      ((1, 256), (2, 172), (1, 320))
      >>> extents((12, 40), 256) is None
      True
    """
    found, remaining = [], block_size or BLOCK
    for extent in reversed(shard_shape):
        if block_size:
            found.append(math.gcd(extent, remaining))
            remaining //= found[-1]
        else:
            found.append(_extent(extent, remaining))
            remaining = -(-remaining // found[-1])
    return None if block_size and remaining > 1 else tuple(reversed(found))


def _extent(size: int, least: int) -> int:
    """Returns the smallest divisor of ``size`` from ``least`` to twice ``least``; if there is none,
    the largest divisor below ``least``."""
    divisors = [k for k in range(1, min(size, 2 * least) + 1) if size % k == 0]
    return next((k for k in divisors if k >= least), divisors[-1])


NOT_QUANTIZED = re.compile(r"(embedding|scale|bias)\W*$")
"""flax's names of tables, whose rows are looked up, and of norms and biases, which are small."""


class QuantizedWeights:
    """The compute parameters that are gathered in blocks (qwZ).

    Args:
      config: The config of the plan.
      leaves: The compute parameters.
      frozen: The paths of the parameters that the optimizer does not update.
      mesh: The devices.

    Raises:
      ConfigError: No block of ``zero_quantized_block_size`` elements divides a parameter, or the
        devices do not support the format.
    """

    def __init__(
        self,
        config: ZeroConfig,
        leaves: Sequence[Leaf],
        frozen: Collection[str],
        mesh: Mesh,
    ) -> None:
        self._how = how = sent_formats(config).weights
        if how is not None and how.format == "float8_e4m3fn":
            _check_float8(mesh.devices.flat[0])
        self._only = None if config.zero_quantized_weights else frozenset(frozen)
        self._sharded = [leaf for leaf in leaves if leaf.sharded and how is not None]
        self.leaves: list[Leaf] = [x for x in self._sharded if how and self._takes(x, how, mesh)]

    def _takes(self, leaf: Leaf, how: Quantization, mesh: Mesh) -> bool:
        if self._only is not None and leaf.path not in self._only:
            return False
        matrix = len(leaf.shape) > 1 and math.prod(leaf.shape) > how.small
        matrix = matrix and jnp.issubdtype(leaf.dtype, jnp.floating)
        if not matrix or NOT_QUANTIZED.search(leaf.path):
            return False
        block = block_of(leaf.shape, leaf.full_spec, mesh, zero_axis(mesh), how)
        if how.block_size and block is None:
            shard_shape = layout.shard_shape(leaf.shape, leaf.full_spec, mesh)
            raise ConfigError(
                f"zero_optimization.zero_quantized_block_size = {how.block_size} does not divide "
                f"{leaf.path} {tuple(leaf.shape)}, whose shards are {shard_shape}, into blocks: "
                f"write {_dividing(shard_shape, how.block_size)}, whose factors divide the "
                "dimensions, or null"
            )
        return block is not None

    @functools.cached_property
    def paths(self) -> frozenset[str]:
        """The paths of the compute parameters that are gathered in blocks."""
        return frozenset(leaf.path for leaf in self.leaves)

    @property
    def notes(self) -> Iterator[str]:
        """A sentence on the parameters that are gathered quantized, and those that are not."""
        if self._how is None:
            return
        form, others = self._how.format, [x for x in self._sharded if x.path not in self.paths]
        key = "weights" if self._only is None else "nontrainable_weights"
        yield (
            f"zero_quantized_{key}: {len(self.leaves)} parameters "
            f"({size(sum(leaf.bytes for leaf in self.leaves))}) are gathered as {form}; "
            f"{len(others)} ({size(sum(leaf.bytes for leaf in others))}) as they are: "
            f"{_some([leaf.path for leaf in others])}"
        )


_TABLES = re.compile(r"\b(\w*embed\w*|wte|wpe|vocab\w*)\b", re.IGNORECASE)
"""Names of tables: flax's, and those of GPT-2."""

_HEADS = re.compile(r"\b(lm_head|head|score|classifier)\b")
"""Names of the last layer."""

FP8_BOUND = (
    "fp8: this step's numbers are not those of plain jit. A product of the parameters that "
    "plan.table() names is within 4% of that in float32, relative to its norm, and a product with "
    "cotangents within 7%. Evaluation and generation compute in bfloat16"
)
"""The sentence that a step with products in fp8 logs once."""


class Fp8Products:
    """The compute parameters whose products run in fp8, and which are gathered as its codes.

    Args:
      config: The config of the plan.
      compute: The compute parameters.
      mesh: The devices.

    Attributes:
      leaves: The parameters.
      others: The paths of the other parameters, by the reason.

    Raises:
      ConfigError: The devices do not multiply in fp8, the mesh shares more than rows, or no
        parameter is left.
    """

    def __init__(self, config: ZeroConfig, compute: Sequence[Leaf], mesh: Mesh) -> None:
        self.leaves, self.others = list[Leaf](), dict[str, list[str]]()
        if config.fp8 is None:
            return
        if not config.fp8.emulate:
            _check_products(mesh.devices.flat[0])
        if mesh.size > batch_devices(mesh):
            raise ConfigError(
                f"fp8: products in fp8 need a mesh that shares only the rows of the batch, and "
                f"this one has {dict(mesh.shape)}. Use the axes data and replica, or leave out fp8"
            )
        tables = [leaf.shape[0] for leaf in compute if leaf.shape and _TABLES.search(leaf.path)]
        for leaf in compute:
            if why := _why_not_in_fp8(leaf, config.fp8, max(tables, default=-1), config):
                self.others.setdefault(why, []).append(leaf.path)
            else:
                self.leaves.append(leaf)
        if compute and not self.leaves:
            raise ConfigError(
                f"fp8: no parameter is for products in fp8. {self._reasons()}. Lower fp8.min_size, "
                "or leave out fp8"
            )

    @property
    def multiplied(self) -> frozenset[str]:
        """The paths of the parameters, within the parameters of the state."""
        return frozenset().union(*(within_params(leaf.full_spec) for leaf in self.leaves))

    @property
    def notes(self) -> Iterator[str]:
        """A sentence on the parameters whose products run in fp8, and those that stay out."""
        if self.leaves:
            yield (
                f"fp8: {len(self.leaves)} parameters ({size(sum(x.bytes for x in self.leaves))} in "
                f"{self.leaves[0].dtype}) are gathered and multiplied as {E4M3}, cotangents as "
                f"{E5M2}: {_some([x.path for x in self.leaves])}. Others are not. {self._reasons()}"
            )

    def _reasons(self) -> str:
        """Returns the reasons for the parameters that stay out, with some names."""
        return "; ".join(f"{why} ({len(x)}): {_some(x)}" for why, x in self.others.items())


def _why_not_in_fp8(leaf: Leaf, how: Fp8Config, vocabulary: int, config: ZeroConfig) -> str:
    """Returns why a parameter stays in the compute dtype; empty if it does not."""
    path, matrix, parts = leaf.path, leaf.shape[-2:], how.filter_fqns.replace(" ", "").split(",")
    reasons = {
        "Not a matrix": len(leaf.shape) not in (2, 3)
        or not jnp.issubdtype(leaf.dtype, jnp.floating),
        "A table, norm or bias": _TABLES.search(path) or NOT_QUANTIZED.search(path),
        "A head": _HEADS.search(path) or vocabulary in matrix,
        "In fp8.filter_fqns": any(part and part in path for part in parts),
        f"Fewer than {how.min_size:,} elements": math.prod(matrix) < how.min_size,
        "Small, gathered with others": math.prod(leaf.shape) <= config.small_array_size,
        "Replicated": not leaf.sharded,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")


def sent_formats(config: ZeroConfig) -> Sent:
    """Returns the formats in which a config sends sharded arrays."""
    if config.stage == 0:
        return UNQUANTIZED
    how = functools.partial(
        Quantization, block_size=config.zero_quantized_block_size, small=config.small_array_size
    )
    weights = how(config.zero_quantized_weights_dtype)  # type: ignore[arg-type]
    grads = how(config.zero_quantized_gradients_dtype)  # type: ignore[arg-type]
    quantized = config.zero_quantized_weights or config.zero_quantized_nontrainable_weights
    return Sent(
        weights if quantized else None,
        grads if config.zero_quantized_gradients else None,
    )


def _check_products(device: jax.Device) -> None:
    capability = getattr(device, "compute_capability", None)
    if device.platform not in GPUS or float(capability or 0) < FLOAT8:
        has = f" has {capability}" if capability else ""
        raise ConfigError(
            f"fp8: products in fp8 need a GPU of compute capability {FLOAT8} or "
            f"more ({', '.join(kinds_with('f8e4m3fn'))}), and this is {device.device_kind}{has}. "
            'Leave out fp8, or write fp8="emulate" (fp8.emulate in the JSON), which computes the '
            "same numbers, and saves no time"
        )


def _check_float8(device: jax.Device) -> None:
    capability = getattr(device, "compute_capability", None)
    if device.platform == "gpu" and float(capability or 0) < FLOAT8:
        raise ConfigError(
            'zero_optimization.zero_quantized_weights_dtype = "float8_e4m3fn" needs a GPU of '
            f"compute capability {FLOAT8}, and {device.device_kind} has {capability}: write "
            '"int8", which takes as many bytes'
        )


def _dividing(shard_shape: Sequence[int], asked: int) -> int:
    """Returns a number of elements of a block that divides a shard, close to the one requested."""
    remaining = asked
    for n in reversed(shard_shape):
        remaining //= math.gcd(n, remaining)
    return asked // remaining
