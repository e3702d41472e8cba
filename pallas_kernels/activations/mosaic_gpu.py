"""GELU of a sum and SwiGLU in one pass over memory, for NVIDIA GPUs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, elementwise, tiles
from pallas_kernels.activations import reference
from pallas_kernels.tiles import Cut, Tile

BLOCKS = 1024
"""Target number of blocks, about as many as an H100 runs at once; more would add partial sums."""
AT_ONCE = 4
"""Number of rows that a block reads before it waits for any of them."""

_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A function of :mod:`reference` for one row, hashed by its settings so that it compiles once.

    If ``masked``, the mask is the last of the arrays.
    """

    function: Callable[..., Any]
    masked: bool
    approximate: bool
    rate: float

    def __call__(self, arrays: Sequence[Any], bias: Any) -> Any:
        x, *more = arrays
        kept = more.pop() != 0 if self.masked else None
        return self.function(x, bias, kept, *more, self.approximate, self.rate, erf)


def bias_gelu(
    x: jax.Array, bias: jax.Array | None, kept: jax.Array | None, approximate: bool, rate: float
) -> jax.Array:
    """Computes :func:`reference.bias_gelu`, in the dtype of x."""
    row = _Row(reference.bias_gelu, kept is not None, approximate, rate)
    return _by_row("bias_gelu", row, False, BLOCKS, bias, x, kept)[0]


def bias_gelu_backward(
    x: jax.Array,
    bias: jax.Array | None,
    kept: jax.Array | None,
    dy: jax.Array,
    approximate: bool,
    rate: float,
) -> tuple[jax.Array, jax.Array | None]:
    """Computes :func:`reference.bias_gelu_backward`, in the dtype of x.

    Also returns its sum over the rows, float32 [width], if there is a bias, else None.
    """
    row = _Row(reference.bias_gelu_backward, kept is not None, approximate, rate)
    sums = bias is not None
    outputs = _by_row("bias_gelu_backward", row, sums, BLOCKS, bias, x, dy, kept)
    return outputs[0], jnp.sum(outputs[1], axis=0) if sums else None


def erf(x: Any) -> Any:
    """Computes the error function with an error of at most 1.5e-7, because Mosaic lacks it.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    size = jnp.abs(x)
    t = 1 / (1 + 0.3275911 * size)
    series = t * _ERF[0]
    for factor in _ERF[1:]:
        series = (series + factor) * t
    result = 1 - series * jnp.exp(-(size * size))
    return jnp.where(x < 0, -result, result)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _by_row(
    name: str,
    row: _Row,
    sums: bool,
    most: int,
    bias: jax.Array | None,
    x: jax.Array,
    *others: jax.Array | None,
) -> list[jax.Array]:
    """Computes ``row(one row of each array, bias)`` for all rows, in the shape and dtype of x.

    A block handles some columns of some rows; there are about ``most`` blocks. With ``sums``, the
    second result is the sum of each block's results, float32 [blocks along the rows, width].
    """
    arrays = [tiles.rows(each) for each in (x, *others) if each is not None]
    rows, width = arrays[0].shape
    vector = tiles.vector_of(arrays[0].dtype.itemsize, width)
    largest = tiles.WARPGROUP * vector
    cut = Cut(width, largest, largest, vector)
    strips = min(rows, -(-most // cut.blocks))
    each, longer_strips = divmod(rows, strips)  # the first strips have one row more

    def body(*refs: Any) -> None:
        ins, outs = refs[: len(arrays)], refs[len(arrays) + (bias is not None) :]
        strip = lax.axis_index("strip")
        first = strip * each + lax.min(strip, longer_strips)

        def work(tile: Tile) -> None:
            part = pl.ds(tile.start, tile.size)
            b = None if bias is None else tiles.load(refs[len(arrays)], (), tile)

            def run_rows(begin: Any, count: int, total: Any) -> Any:
                loaded = [[tiles.load(r, (begin + i,), tile) for r in ins] for i in range(count)]
                for i, values in enumerate(loaded):
                    result = row(values, b)
                    outs[0][begin + i, part] = result.astype(outs[0].dtype)
                    total = result if total is None else total + result
                return total if sums else None

            head = each % AT_ONCE or min(each, AT_ONCE)

            def run_step(i: Any, total: Any) -> Any:
                return run_rows(first + head + i * AT_ONCE, AT_ONCE, total)

            total = run_rows(first, head, None)
            total = lax.fori_loop(0, (each - head) // AT_ONCE, run_step, total)
            if sums:
                outs[1][strip, part] = total

            if longer_strips:

                @pl.when(strip < longer_strips)
                def _() -> None:
                    with_last_row = run_rows(first + each, 1, total)
                    if sums:
                        outs[1][strip, part] = with_last_row

        def columns(_: int, found: Sequence[Tile]) -> None:
            # If the last tile overlaps the tile before, both write the same values.
            for tile in found:
                work(tile)

        tiles.of_block([cut], lax.axis_index("column"), columns)

    outputs = [jax.ShapeDtypeStruct((rows, width), arrays[0].dtype)]
    if sums:
        outputs.append(jax.ShapeDtypeStruct((strips, width), jnp.float32))
    result, *totals = compat.launch(
        body,
        [*arrays, *([] if bias is None else [bias])],
        outputs,
        {},
        grid=(strips, cut.blocks),
        grid_names=("strip", "column"),
        compiler_params=tiles.params(unsafe_no_auto_barriers=True),
        kernel_name=name,
    )
    return [result.reshape(x.shape), *totals]


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes :func:`reference.swiglu`, in the arguments' dtype."""
    return _elementwise("swiglu", _swiglu, [gate, up], 1)[0]


def swiglu_backward(gate: jax.Array, up: jax.Array, dy: jax.Array) -> list[jax.Array]:
    """Computes :func:`reference.swiglu_backward`, in the arguments' dtype."""
    return _elementwise("swiglu_backward", _swiglu_backward, [gate, up, dy], 2)


def _swiglu(_: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    return [reference.swiglu(*arrays)]


def _swiglu_backward(_: Sequence[Any], arrays: Sequence[Any]) -> tuple[Any, Any]:
    return reference.swiglu_backward(*arrays)


def _elementwise(
    name: str, function: elementwise.Function, arrays: Sequence[jax.Array], results: int
) -> list[jax.Array]:
    no_scalars = jnp.zeros(1, jnp.float32)
    dtypes = [arrays[0].dtype] * results
    return elementwise.elementwise(function, no_scalars, [arrays], dtypes, {}, name=name)[0]
