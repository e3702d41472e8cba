"""Normalization of rows, each read once, for NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tiles
from pallas_kernels.norms.reference import Forward, How, normalized
from pallas_kernels.norms.row import Row, launch

SMALLEST = tiles.WARPGROUP
"""Minimum elements of a row."""
LARGEST = 16384
"""Maximum elements of a row: sums of the backward pass must fit into shared memory."""


def forward(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
    how: How,
) -> Forward:
    """Computes :func:`pallas_kernels.norms.reference.forward`."""
    width = x.shape[-1]
    rows = x.size // width
    cut = Row(width, x.dtype.itemsize)
    at_once = cut.together(rows, 1)

    def body(**refs: Any) -> None:
        first = lax.axis_index("block") * at_once
        group_rows = [first + i for i in range(at_once)]

        def read(name: str, row: Any, k: Any) -> Any:
            return tiles.load(refs[name], (row,), cut.tile(k))

        def sum_of(row: Any, k: Any) -> Any:
            h = read("x", row, k)
            if residual is None:
                return h
            sum_in_float32 = read("residual", row, k).astype(jnp.float32) + h.astype(jnp.float32)
            return sum_in_float32.astype(x.dtype)

        loaded: list[list[Any]] = [[] for _ in group_rows]
        if cut.held:
            loaded = [[sum_of(row, k) for k in range(cut.count)] for row in group_rows]

        def value(i: int, k: Any) -> Any:
            h = loaded[i][k] if cut.held else sum_of(group_rows[i], k)
            return h.astype(jnp.float32)

        def mean(i: int) -> Any:
            def add(k: Any, total: Any) -> Any:
                return total + cut.fresh(k, value(i, k))

            return cut.mean(cut.each(add, cut.zeros()))

        def variance(i: int, mean: Any) -> Any:
            def add(k: Any, total: Any) -> Any:
                deviation = value(i, k) if mean is None else value(i, k) - mean
                return total + cut.fresh(k, deviation * deviation)

            return cut.mean(cut.each(add, cut.zeros()))

        means, scales = [], []
        for i, row in enumerate(group_rows):
            means.append(mean(i) if how.centered else None)
            scales.append(lax.rsqrt(variance(i, means[i]) + how.eps))
            refs["scale"][row] = scales[i]
            if how.centered:
                refs["mean"][row] = means[i]

        def write(k: Any, _: None) -> None:
            w = tiles.load(refs["weight"], (), cut.tile(k)).astype(jnp.float32)
            b = None
            if bias is not None:
                b = tiles.load(refs["bias"], (), cut.tile(k)).astype(jnp.float32)
            for i, row in enumerate(group_rows):
                z = value(i, k)
                y = normalized(z, means[i], scales[i]) * w
                refs["y"][row, cut.part(k)] = (y if b is None else y + b).astype(x.dtype)
                if residual is not None:
                    refs["h"][row, cut.part(k)] = z.astype(x.dtype)

        cut.each(write)

    inputs = {"x": tiles.rows(x), "residual": tiles.rows(residual), "weight": weight, "bias": bias}
    like = jax.ShapeDtypeStruct((rows, width), x.dtype)
    row_statistic = jax.ShapeDtypeStruct((rows,), jnp.float32)
    outputs = {
        "y": like,
        "h": None if residual is None else like,
        "mean": row_statistic if how.centered else None,
        "scale": row_statistic,
    }
    results = launch(how.name, body, inputs, outputs, rows // at_once)
    return Forward(
        results["y"].reshape(x.shape),
        x if residual is None else results["h"].reshape(x.shape),
        results["mean"].reshape(x.shape[:-1]) if how.centered else None,
        results["scale"].reshape(x.shape[:-1]),
    )
