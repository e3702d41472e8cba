"""Split of rows among the threads of a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat, tiles
from pallas_kernels.tiles import Tile

HELD = 256
"""Maximum bytes of a row that a thread keeps in registers; it reads wider rows several times."""
AT_ONCE = 4
"""Maximum number of rows that a block reads before it waits for any of them, if they fit."""
AGAIN = 4
"""Number of reads that a thread has in flight for a row that it does not keep in registers."""


class Row:
    """Split of a row into tiles of one size, so that each thread can keep its sums.

    The last tile overlaps the tile before if the width is not a multiple of the size.

    Attributes:
      width: elements of the row.
      size: elements of a tile.
      count: the number of tiles.
      held: True if threads keep the row in registers.
    """

    def __init__(self, width: int, itemsize: int) -> None:
        max_vector = min(tiles.vector_of(itemsize, width), width // tiles.WARPGROUP)
        vectors = [2**i for i in range(max_vector.bit_length())]
        # Balances the number of overlapping elements against the number of reads.
        self.vector = min(vectors, key=lambda v: -(-width // (tiles.WARPGROUP * v)) * (v + 1))
        self.width = width
        self.size = tiles.WARPGROUP * self.vector
        self.bytes_each = -(-width // self.size) * self.vector * itemsize
        self.held = self.bytes_each <= HELD
        if not self.held:
            self.size *= AGAIN
        self.whole, remainder = divmod(width, self.size)
        self.last = Tile(width - self.size, self.size, self.size - remainder, self.vector)
        self.count = self.whole + (remainder > 0)
        self.layout = self.last.layout

    def tile(self, k: Any) -> Tile:
        """Returns tile k; for the last tile, k must be a Python int."""
        if isinstance(k, int) and k == self.whole:
            return self.last
        return Tile(k * self.size, self.size, 0, self.vector)

    def each(self, step: Callable[[Any, Any], Any], carry: Any = None) -> Any:
        """Runs ``carry = step(k, carry)`` for all tiles; ``k`` is a Python int if ``held``."""
        if self.held:
            for k in range(self.whole):
                carry = step(k, carry)
        else:
            carry = lax.fori_loop(0, self.whole, step, carry)
        return carry if self.count == self.whole else step(self.whole, carry)

    def zeros(self) -> Any:
        """Returns a tile of zeros, float32."""
        return compat.laid_out(jnp.zeros((self.size,), jnp.float32), self.layout)

    def fresh(self, k: Any, value: Any) -> Any:
        """Sets a tile's values to 0 for elements that are also in the tile before."""
        fresh = tiles.fresh(self.tile(k))
        return value if fresh is None else jnp.where(fresh, value, self.zeros())

    def mean(self, total: Any) -> Any:
        """Computes the mean over the row from the sum of its tiles."""
        return jnp.sum(total) * (1 / self.width)

    def together(self, rows: int, arrays: int) -> int:
        """Returns how many rows of ``arrays`` arrays fit in a block at a time; divides ``rows``."""
        max_rows = max(1, min(AT_ONCE, HELD // (arrays * self.bytes_each)))
        return math.gcd(rows, 1 << (max_rows.bit_length() - 1))

    def part(self, k: Any) -> Any:
        """Returns the tile's slice of a row."""
        tile = self.tile(k)
        return pl.ds(tile.start, tile.size)

    def own(self, k: Any) -> Any:
        """Returns the tile's slice of :meth:`sums`, where tiles do not overlap."""
        return pl.ds(k * self.size, self.size)

    def sums(self) -> Any:
        """Returns shared memory for one float32 number per element of each tile.

        Overlapping tiles have separate sums, so that no thread reads what another thread wrote.
        """
        return plgpu.SMEM((self.count * self.size,), jnp.float32)


def launch(
    name: str,
    body: Callable[..., None],
    inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct | None],
    blocks: int,
    scratch: Sequence[Any] = (),
) -> dict[str, jax.Array]:
    """Runs ``body(*scratch, **refs)`` in blocks of one warpgroup, without arrays that are None."""
    ins = {key: value for key, value in inputs.items() if value is not None}
    outs = {key: value for key, value in outputs.items() if value is not None}

    def with_names(*refs: Any) -> None:
        count = len(ins) + len(outs)
        body(*refs[count:], **dict(zip([*ins, *outs], refs[:count], strict=True)))

    results = plgpu.kernel(
        with_names,
        out_type=[*outs.values()],
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[*scratch],
        # Each thread reads only scratch memory that it wrote itself.
        compiler_params=tiles.params(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )(*ins.values())
    return dict(zip(outs, results, strict=True))
