"""Statistics and gradient of a chunk's logits, each row read once, for NVIDIA GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, tiles
from pallas_kernels.cross_entropy.reference import SKIP, Factors, Statistics
from pallas_kernels.tiles import Tile

SMALLEST = tiles.WARPGROUP
"""Minimum vocabulary."""
# Written tiles are larger, because all threads synchronize before and after a tile is written.
_READ, _WRITTEN = 8 * tiles.WARPGROUP, 16 * tiles.WARPGROUP
_LOWEST = float(jnp.finfo(jnp.float32).min)


class _Row:
    """Split of a row of logits into tiles of one size, so that each thread can keep its sums.

    Attributes:
      count: the number of tiles that begin at multiples of their size.
      last: the tile that ends at the row's end and overlaps the tile before; None if not needed.
      inside: the number of elements of ``last`` within the vocabulary.
    """

    def __init__(self, width: int, vocabulary: int, largest: int) -> None:
        self.size = min(largest, 2 ** int(math.log2(vocabulary)))
        self.vector = min(tiles.vector_of(4, width), self.size // tiles.WARPGROUP)
        self.count, remainder = divmod(vocabulary, self.size)
        start = width - self.size
        overlap = self.count * self.size - start
        self.last = Tile(start, self.size, overlap, self.vector) if remainder else None
        self.inside = vocabulary - start

    def tile(self, k: Any) -> Tile:
        return Tile(k * self.size, self.size, 0, self.vector)

    def full(self, value: Any) -> Any:
        return compat.laid_out(jnp.full((self.size,), value, jnp.float32), self.tile(0).layout)

    def places(self) -> Any:
        return tiles.places(self.tile(0))

    def within(self, value: Any, fill: float, first: int = 0) -> Any:
        """Sets the last tile's values before ``first`` and beyond the vocabulary to ``fill``."""
        places = self.places()
        is_inside = lax.ge(places, first) & lax.lt(places, self.inside)
        return jnp.where(is_inside, value, self.full(fill))


def statistics(logits: jax.Array, labels: jax.Array, vocabulary: int, total: bool) -> Statistics:
    """Computes :func:`pallas_kernels.cross_entropy.reference.statistics` in one pass."""
    cut = _Row(logits.shape[1], vocabulary, _READ)

    def step(z: Any, sums: tuple[Any, ...]) -> tuple[Any, Any]:
        """Updates each thread's running maxima, and its sums of exponentials relative to them."""
        maxima, exp_sums = sums
        difference = z - maxima
        # One exponential, of a value <= 0. The difference of equal infinities is NaN.
        decay = jnp.exp(jnp.minimum(difference, -difference))
        decay = jnp.where(z == maxima, cut.full(1.0), decay)
        return jnp.maximum(maxima, z), jnp.where(
            z > maxima, exp_sums * decay + 1.0, exp_sums + decay
        )

    def body(logit: Any, label: Any, *results: Any) -> None:
        row = lax.axis_index("row")
        y = label[row]

        def add(k: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
            z = tiles.load(logit, (row,), cut.tile(k))
            return *step(z, sums[:2]), *(t + z for t in sums[2:])

        @pl.when(y != SKIP)
        def _() -> None:
            sums = (cut.full(_LOWEST), cut.full(0.0), *([cut.full(0.0)] if total else []))
            maxima, exp_sums, *totals = lax.fori_loop(0, cut.count, add, sums)
            if cut.last is not None:
                z = tiles.load(logit, (row,), cut.last)
                maxima, exp_sums = step(cut.within(z, -jnp.inf, cut.last.again), (maxima, exp_sums))
                totals = [t + cut.within(z, 0.0, cut.last.again) for t in totals]
            top = jnp.max(maxima)
            exp_sums = jnp.where(maxima == top, exp_sums, exp_sums * jnp.exp(maxima - top))
            lse = top + jnp.log(jnp.sum(exp_sums))
            values = (lse, logit[row, y], *map(jnp.sum, totals))
            for result, value in zip(results, values, strict=True):
                result[row] = value

        @pl.when(y == SKIP)
        def _() -> None:
            for result in results:
                result[row] = jnp.float32(0)

    outputs = [jax.ShapeDtypeStruct(labels.shape, jnp.float32)] * (3 if total else 2)
    arrays = _launch(body, [logits, labels], outputs, "statistics")
    return Statistics(arrays[0], arrays[1], arrays[2] if total else None)


def gradient(
    logits: jax.Array,
    labels: jax.Array,
    vocabulary: int,
    lse: jax.Array,
    factors: Factors,
    dtype: Any,
) -> jax.Array:
    """Computes :func:`pallas_kernels.cross_entropy.reference.gradient`."""
    cut = _Row(logits.shape[1], vocabulary, _WRITTEN)

    def body(logit: Any, label: Any, *refs: Any) -> None:
        row = lax.axis_index("row")
        *scalar_refs, result = refs
        y = label[row]
        lse, probability, of_label, uniform = (ref[row] for ref in scalar_refs)

        def write(tile: Tile, value: Any) -> None:
            value = cut.within(value, 0.0) if tile is cut.last else value
            result[row, pl.ds(tile.start, tile.size)] = value.astype(dtype)

        def tile_gradient(tile: Tile, z: Any) -> Any:
            is_label = cut.places() == jnp.full((cut.size,), y - tile.start, jnp.int32)
            label_term = jnp.where(is_label, cut.full(of_label), cut.full(0.0))
            return jnp.exp(z - lse) * probability - label_term - uniform

        def for_each_tile(function: Callable[[Tile], Any]) -> None:
            def write_tile(k: Any, _: None) -> None:
                write(cut.tile(k), function(cut.tile(k)))

            lax.fori_loop(0, cut.count, write_tile, None)

        @pl.when(y != SKIP)
        def _() -> None:
            def of_logits(tile: Tile) -> Any:
                return tile_gradient(tile, tiles.load(logit, (row,), tile))

            for_each_tile(of_logits)
            if cut.last is not None:
                write(cut.last, of_logits(cut.last))

        @pl.when(y == SKIP)
        def _() -> None:
            for_each_tile(lambda tile: cut.full(uniform))
            if cut.last is not None:
                write(cut.last, cut.full(uniform))

    like = jax.ShapeDtypeStruct(logits.shape, dtype)
    return _launch(body, [logits, labels, lse, *factors], [like], "gradient")[0]


def _launch(
    body: Callable[..., None],
    inputs: list[jax.Array],
    outputs: list[jax.ShapeDtypeStruct],
    name: str,
) -> list[jax.Array]:
    """Launches one block per row."""
    return plgpu.kernel(  # type: ignore[no-any-return]
        body,
        out_type=outputs,
        grid=(len(inputs[0]),),
        grid_names=("row",),
        compiler_params=tiles.params(),
        kernel_name=f"cross_entropy_{name}",
    )(*inputs)
