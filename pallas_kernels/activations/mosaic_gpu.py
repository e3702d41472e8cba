"""GELU of a sum and SwiGLU in one pass over memory, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, elementwise, tiles
from pallas_kernels.activations import reference
from pallas_kernels.tiles import Tile

BLOCKS = 1024
"""About as many as an H100 runs at once; more would only leave more partial sums to add up."""
AT_ONCE = 4
"""Rows that a block reads before it waits for one of them."""

_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)

Row = Callable[[Sequence[Any], Any], Any]


def bias_gelu(
    x: jax.Array, bias: jax.Array | None, kept: jax.Array | None, approximate: bool, rate: float
) -> jax.Array:
    """As :func:`reference.bias_gelu` for x [rows, width], in its dtype."""

    def row(loaded: Sequence[Any], b: Any) -> Any:
        (x, *mask) = loaded
        return reference.bias_gelu(x, b, _bool(mask), approximate, rate, erf)

    return _by_row("bias_gelu", row, [x, *_bytes(kept)], bias, sums=False)[0]


def bias_gelu_backward(
    x: jax.Array,
    bias: jax.Array | None,
    kept: jax.Array | None,
    dy: jax.Array,
    approximate: bool,
    rate: float,
) -> tuple[jax.Array, jax.Array | None]:
    """As :func:`reference.bias_gelu_backward`, in the dtype of x; and its sum over the rows,
    float32 [width], if there is a bias."""

    def row(loaded: Sequence[Any], b: Any) -> Any:
        (x, dy, *mask) = loaded
        return reference.bias_gelu_backward(x, b, _bool(mask), dy, approximate, rate, erf)

    found = _by_row("bias_gelu_backward", row, [x, dy, *_bytes(kept)], bias, bias is not None)
    return found[0], None if bias is None else jnp.sum(found[1], axis=0)


def erf(x: Any) -> Any:
    """The error function, to 1.5e-7; Mosaic has none.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    size = jnp.abs(x)
    t = 1 / (1 + 0.3275911 * size)
    series = t * _ERF[0]
    for factor in _ERF[1:]:
        series = (series + factor) * t
    found = 1 - series * jnp.exp(-(size * size))
    return jnp.where(x < 0, -found, found)


def _bytes(kept: jax.Array | None) -> list[jax.Array]:
    return [] if kept is None else [kept.astype(jnp.int8)]


def _bool(mask: Sequence[Any]) -> Any:
    return mask[0] != 0 if mask else None


def _by_row(
    name: str, row: Row, arrays: Sequence[jax.Array], bias: jax.Array | None, sums: bool
) -> list[jax.Array]:
    """``row(one row of each array, bias)`` for all rows, in the dtype of the first array.

    A block takes some columns of some rows. With ``sums`` it adds up what it finds, float32
    [blocks along the rows, width].
    """
    rows, width = arrays[0].shape
    vector = tiles.vector_of(arrays[0].dtype.itemsize, width)
    largest = tiles.WARPGROUP * vector
    columns = max(1, width // largest)
    strips = min(rows, -(-BLOCKS // columns))
    each, longer = divmod(rows, strips)  # the first strips have one row more

    def body(*refs: Any) -> None:
        ins, outs = refs[: len(arrays)], refs[len(arrays) + (bias is not None) :]
        column: Any = lax.axis_index("column")
        strip = lax.axis_index("strip")
        first = strip * each + lax.min(strip, longer)

        def work(tile: Tile) -> None:
            part = pl.ds(tile.start, tile.size)
            b = None if bias is None else tiles.load(refs[len(arrays)], (), tile)

            def some(begin: Any, count: int, total: Any) -> Any:
                loaded = [[tiles.load(r, (begin + i,), tile) for r in ins] for i in range(count)]
                for i, values in enumerate(loaded):
                    made = row(values, b)
                    outs[0][begin + i, part] = made.astype(outs[0].dtype)
                    total = made if total is None else total + made
                return total if sums else None

            head = each % AT_ONCE or min(each, AT_ONCE)

            def more(i: Any, total: Any) -> Any:
                return some(first + head + i * AT_ONCE, AT_ONCE, total)

            total = some(first, head, None)
            total = lax.fori_loop(0, (each - head) // AT_ONCE, more, total)
            if sums:
                outs[1][strip, part] = total

            if longer:

                @pl.when(strip < longer)
                def _() -> None:
                    after = some(first + each, 1, total)
                    if sums:
                        outs[1][strip, part] = after

        def last() -> None:
            begin = (columns - 1) * largest
            # Where the last tile reaches back, it finds the same as the one before it.
            for tile in tiles.tiles(width - begin, largest, vector):
                work(tile._replace(start=begin + tile.start))

        if columns > 1:
            whole = Tile(column * largest, largest, 0, vector)
            pl.when(column < columns - 1)(lambda: work(whole))
        pl.when(column == columns - 1)(last)

    outputs = [jax.ShapeDtypeStruct((rows, width), arrays[0].dtype)]
    if sums:
        outputs.append(jax.ShapeDtypeStruct((strips, width), jnp.float32))
    return compat.launch(
        body,
        [*arrays, *([] if bias is None else [bias])],
        outputs,
        {},
        grid=(strips, columns),
        grid_names=("strip", "column"),
        compiler_params=tiles.params(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """As :func:`reference.swiglu`, in their dtype."""
    return _elementwise("swiglu", lambda *x: [reference.swiglu(*x)], [gate, up], 1)[0]


def swiglu_backward(gate: jax.Array, up: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """As :func:`reference.swiglu_backward`, in their dtype."""
    return _elementwise("swiglu_backward", reference.swiglu_backward, [gate, up, dy], 2)


def _elementwise(
    name: str, function: Callable[..., Any], arrays: Sequence[jax.Array], results: int
) -> list[jax.Array]:
    made = elementwise.elementwise(
        lambda _, values: function(*values),
        jnp.zeros(1, jnp.float32),
        [arrays],
        [arrays[0].dtype] * results,
        {},
        name=name,
    )
    return made[0]
