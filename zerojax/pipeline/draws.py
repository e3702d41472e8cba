"""Random numbers in the shape of the batch, drawn for some of its rows only.

A layer that draws a mask for all rows (dropout) draws, for one device's rows of a micro-batch, the
numbers that these rows have on the global batch. jax's default generator computes each number from
the key and the number's position in the array, so that no other row is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from zerojax.accumulation.lines import where
from zerojax.accumulation.pairs import EquationPair, scaled
from zerojax.graph.primitives import DRAWS
from zerojax.graph.search import contains
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation

_GENERATOR = "threefry2x32"


def evaluate(
    whole: AnyJaxpr, part: AnyJaxpr, args: Sequence[Any], first_row: jax.Array, rows: int
) -> list[Any]:
    """Runs a program on some rows of the batch, with the random numbers of the global batch.

    Args:
      whole: The program on the global batch.
      part: The same program on some of its rows, equation by equation.
      args: The arguments of ``part``.
      first_row, rows: The first of these rows in the batch, int [], and their number.

    Raises:
      ValueError: Random numbers are drawn inside a loop or a branch, or by another generator.
    """
    jaxpr, consts = jaxprs.open_jaxpr(part)
    env: dict[Atom, Any] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    for pair in map(EquationPair, jaxprs.open_jaxpr(whole)[0].eqns, jaxpr.eqns):
        eqn = pair.micro_eqn
        values = [jaxprs.read(v, env) for v in eqn.invars]
        if not contains(eqn, _is_draw):
            outs: Sequence[Any] = jaxprs.bind_in_context(eqn, values)
        elif eqn.primitive in jaxprs.CALLS:
            inside = jaxprs.called_jaxpr(pair.global_eqn), jaxprs.called_jaxpr(eqn)
            outs = evaluate(*inside, values, first_row, rows)
        elif dims := scaled(pair.global_eqn.outvars[0].aval, eqn.outvars[0].aval):
            outs = [_drawn(pair, values, dims[0], first_row, rows)]
        else:
            _check(eqn, _is_draw(eqn))
            outs = jaxprs.bind_in_context(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [jaxprs.read(v, env) for v in jaxpr.outvars]


def _is_draw(eqn: Equation) -> bool:
    return eqn.primitive.name in DRAWS


def _drawn(
    pair: EquationPair, values: Sequence[jax.Array], dim: int, first_row: jax.Array, rows: int
) -> jax.Array:
    """Draws the random bits of some rows; ``dim`` is the dimension that holds the rows."""
    eqn, whole = pair.micro_eqn, pair.global_eqn.outvars[0].aval
    if len(jaxprs.param(eqn, "shape", ())) < eqn.outvars[0].aval.ndim:
        return jaxprs.bind_in_context(eqn, values)[0]  # every row has a key
    (key,) = values
    known = eqn.primitive.name == "random_bits" and str(jax.random.key_impl(key)) == _GENERATOR
    config: Any = jax.config
    _check(eqn, known and config.jax_threefry_partitionable)
    shape, each = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.shape[dim] // rows
    # The position of an element is (outer * size + row) * inner + rest, in 64 bits.
    inner = math.prod(shape[dim + 1 :])
    outer, row, rest = (
        jnp.arange(n, dtype=jnp.uint32) for n in (math.prod(shape[:dim]), shape[dim], inner)
    )
    row += first_row.astype(jnp.uint32) * np.uint32(each)
    high, low = _product(outer[:, None] * np.uint32(whole.shape[dim]) + row, inner)
    position = low[..., None] + rest
    high = high[..., None] + (position < rest).astype(jnp.uint32)
    one, two = jax.random.key_data(key)
    counts = [x.reshape(shape) for x in (high, position)]
    bits = threefry2x32_p.bind(one, two, *counts)
    width, dtype = jaxprs.param(eqn, "bit_width"), eqn.outvars[0].aval.dtype
    if width == 64:
        return bits[0].astype(dtype) << np.uint64(32) | bits[1].astype(dtype)
    return (bits[0] ^ bits[1]).astype(dtype)


def _product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low 32 bits of the products of 32-bit numbers."""
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & mask, np.uint32(b >> 16), np.uint32(b & 0xFFFF)
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (other >> half), a * np.uint32(b)


def _check(eqn: Equation, fits: bool) -> None:
    if not fits:
        raise ValueError(
            f"a layer draws random numbers ({where(eqn)}) that pipeline stages cannot draw row by "
            "row: draw them outside of loops and branches within the layer, with jax's default "
            "generator (jax_default_prng_impl = threefry2x32, jax_threefry_partitionable = True)."
        )
