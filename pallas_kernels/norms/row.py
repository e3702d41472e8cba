"""How rows are cut among the threads of a GPU."""

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
"""Bytes of a row that a thread keeps in registers; it reads wider rows again."""
AT_ONCE = 4
"""Rows that a block reads before it waits for one of them, if they fit."""
AGAIN = 4
"""Reads that a thread has on the way of a row that it does not keep."""


class Row:
    """Tiles of one size, so that threads can keep sums of their own.

    The last tile reaches back, where the width is no multiple of the size.

    Attributes:
      width: elements.
      size: of a tile.
      count: tiles.
      held: whether threads keep the row.
    """

    def __init__(self, width: int, itemsize: int) -> None:
        most = min(tiles.vector_of(itemsize, width), width // tiles.WARPGROUP)
        vectors = [2**i for i in range(most.bit_length())]
        # Few elements twice, and few reads.
        self.vector = min(vectors, key=lambda v: -(-width // (tiles.WARPGROUP * v)) * (v + 1))
        self.width = width
        self.size = tiles.WARPGROUP * self.vector
        self.bytes_each = -(-width // self.size) * self.vector * itemsize
        self.held = self.bytes_each <= HELD
        if not self.held:
            self.size *= AGAIN
        self.whole, rest = divmod(width, self.size)
        self.last = Tile(width - self.size, self.size, self.size - rest, self.vector)
        self.count = self.whole + (rest > 0)
        self.layout = self.last.layout

    def tile(self, k: Any) -> Tile:
        """The one with that number, which has to be known for the last one."""
        if isinstance(k, int) and k == self.whole:
            return self.last
        return Tile(k * self.size, self.size, 0, self.vector)

    def each(self, step: Callable[[Any, Any], Any], carry: Any = None) -> Any:
        """``carry = step(k, carry)`` for all tiles; ``k`` is known if they are held."""
        if self.held:
            for k in range(self.whole):
                carry = step(k, carry)
        else:
            carry = lax.fori_loop(0, self.whole, step, carry)
        return carry if self.count == self.whole else step(self.whole, carry)

    def zeros(self) -> Any:
        """A tile of them, float32."""
        return compat.laid_out(jnp.zeros((self.size,), jnp.float32), self.layout)

    def fresh(self, k: Any, value: Any) -> Any:
        """A tile's values, 0 for elements that the tile before has, too."""
        fresh = tiles.fresh(self.tile(k))
        return value if fresh is None else jnp.where(fresh, value, self.zeros())

    def mean(self, total: Any) -> Any:
        """Over the row, of a tile that all others were added to."""
        return jnp.sum(total) * (1 / self.width)

    def together(self, rows: int, arrays: int) -> int:
        """Rows of so many arrays that a block takes at a time: as many as fit, and divide all."""
        fit = max(1, min(AT_ONCE, HELD // (arrays * self.bytes_each)))
        return math.gcd(rows, 1 << (fit.bit_length() - 1))

    def part(self, k: Any) -> Any:
        """Where the tile is in a row."""
        tile = self.tile(k)
        return pl.ds(tile.start, tile.size)

    def own(self, k: Any) -> Any:
        """Where the tile is among as many that do not overlap."""
        return pl.ds(k * self.size, self.size)

    def sums(self) -> Any:
        """Shared memory for a number an element, float32. Overlapping tiles have sums of their
        own, so that no thread needs what another one wrote."""
        return plgpu.SMEM((self.count * self.size,), jnp.float32)


def launch(
    name: str,
    body: Callable[..., None],
    inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct | None],
    blocks: int,
    scratch: Sequence[Any] = (),
) -> dict[str, jax.Array]:
    """``body(*scratch, **refs)`` in blocks of one warpgroup; what is None is left out."""
    ins = {key: value for key, value in inputs.items() if value is not None}
    outs = {key: value for key, value in outputs.items() if value is not None}

    def named(*refs: Any) -> None:
        count = len(ins) + len(outs)
        body(*refs[count:], **dict(zip([*ins, *outs], refs[:count], strict=True)))

    found = compat.launch(
        named,
        [*ins.values()],
        [*outs.values()],
        {},
        grid=(blocks,),
        grid_names=("block",),
        scratch_types=[*scratch],
        # Each thread reads only what it wrote itself.
        compiler_params=tiles.params(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )
    return dict(zip(outs, found, strict=True))
