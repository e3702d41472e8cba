"""Cotangents of normalized rows in one pass over memory, for NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat, tiles
from pallas_kernels.norms.reference import Backward, How, normalized
from pallas_kernels.norms.row import Row, launch

BLOCKS = 264
"""Maximum number of blocks: two per multiprocessor of an H100, as many as its registers allow. Each
block writes sums over its rows, which must be added afterwards."""


def backward(
    h: jax.Array,
    weight: jax.Array,
    mean: jax.Array | None,
    scale: jax.Array,
    dy: jax.Array,
    dh: jax.Array | None,
    how: How,
) -> Backward:
    """Computes :func:`pallas_kernels.norms.reference.backward`."""
    width = h.shape[-1]
    rows = h.size // width
    cut = Row(width, h.dtype.itemsize)
    at_once = cut.together(rows, 2)
    groups = rows // at_once
    blocks = min(groups, BLOCKS)
    param_names = ["weight"] if how.bias is None else ["weight", "bias"]

    def body(*sums: Any, **refs: Any) -> None:
        block = lax.axis_index("block")

        def read(name: str, row: Any, k: Any) -> Any:
            return tiles.load(refs[name], (row,), cut.tile(k))

        def group(first: Any) -> None:
            group_rows = [first + i for i in range(at_once)]
            loaded: list[list[Any]] = [[] for _ in group_rows]
            if cut.held:
                pairs = [
                    [(read("h", row, k), read("dy", row, k)) for k in range(cut.count)]
                    for row in group_rows
                ]
                loaded = pairs
            scales = [refs["scale"][row] for row in group_rows]
            means = [refs["mean"][row] if how.centered else None for row in group_rows]

            def values(i: int, k: Any) -> tuple[Any, Any]:
                """Returns the normalized row, and dy."""
                z, d = (
                    loaded[i][k] if cut.held else [read(n, group_rows[i], k) for n in ("h", "dy")]
                )
                return normalized(z.astype(jnp.float32), means[i], scales[i]), d.astype(jnp.float32)

            def add(k: Any, totals: Any) -> Any:
                w = tiles.load(refs["weight"], (), cut.tile(k)).astype(jnp.float32)
                new_totals = []
                for i, old in enumerate(totals):
                    hat, d = values(i, k)
                    g = cut.fresh(k, d * w)
                    new_totals.append([a + b for a, b in zip(old, (g * hat, g), strict=False)])
                return new_totals

            zeros = [[cut.zeros()] * (2 if how.centered else 1) for _ in group_rows]
            # Per row, the terms to subtract for the variance and for the mean.
            corrections = [[cut.mean(total) for total in totals] for totals in cut.each(add, zeros)]

            def write(k: Any, _: None) -> None:
                w = tiles.load(refs["weight"], (), cut.tile(k)).astype(jnp.float32)
                totals = [compat.laid_out(ref[cut.own(k)], cut.layout) for ref in sums]
                for i, row in enumerate(group_rows):
                    hat, d = values(i, k)
                    totals = [a + b for a, b in zip(totals, (d * hat, d), strict=False)]
                    g = d * w - hat * corrections[i][0]
                    g = (g - corrections[i][1] if how.centered else g) * scales[i]
                    if dh is not None:
                        g = g + read("dh", row, k).astype(jnp.float32)
                    refs["dx"][row, cut.part(k)] = g.astype(h.dtype)
                for ref, total in zip(sums, totals, strict=True):
                    ref[cut.own(k)] = total

            cut.each(write)

        def clear(k: Any, _: None) -> None:
            for ref in sums:
                ref[cut.own(k)] = cut.zeros()

        def run_group(i: Any, _: None) -> None:
            group_index = block + i * blocks
            pl.when(group_index < groups)(lambda: group(group_index * at_once))

        def write_sums(k: Any, _: None) -> None:
            for name, ref in zip(param_names, sums, strict=True):
                refs[f"d_{name}"][block, cut.part(k)] = compat.laid_out(ref[cut.own(k)], cut.layout)

        cut.each(clear)
        lax.fori_loop(0, -(-groups // blocks), run_group, None)
        cut.each(write_sums)

    inputs = {
        "h": tiles.rows(h),
        "dy": tiles.rows(dy),
        "dh": tiles.rows(dh),
    }
    inputs |= {"weight": weight, "scale": scale.reshape(-1)}
    inputs |= {"mean": None if mean is None else mean.reshape(-1)}
    outputs: dict[str, Any] = {"dx": jax.ShapeDtypeStruct((rows, width), h.dtype)}
    outputs |= {
        f"d_{name}": jax.ShapeDtypeStruct((blocks, width), jnp.float32) for name in param_names
    }
    scratch = [cut.sums() for _ in param_names]
    results = launch(f"{how.name}_backward", body, inputs, outputs, blocks, scratch)
    return Backward(
        results["dx"].reshape(h.shape),
        jnp.sum(results["d_weight"], axis=0),
        None if how.bias is None else jnp.sum(results["d_bias"], axis=0),
    )
