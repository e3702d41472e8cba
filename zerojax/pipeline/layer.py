"""The program of a layer on one device, for that device's rows of a micro-batch.

Three kinds of equations need the place of these rows, or of the device:

- Random numbers in the shape of the batch (dropout) are those that these rows have on the global
  batch. jax's default generator computes each number from the key and the number's position in the
  array, so that no other row is drawn.
- A ``shard_map`` over the axes of the batch (a kernel) is replaced by its unchanged function.
- Sharding constraints keep the axes that the device's program does not divide, such as "model".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as prims
from jax.extend.random import threefry2x32_p
from jax.sharding import NamedSharding, PartitionSpec

from zerojax.accumulation.symbolic import growing
from zerojax.graph.primitives import DRAWS
from zerojax.graph.search import contains
from zerojax.plan import layout
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.types import AnyJaxpr, Equation

_GENERATOR = "threefry2x32"


class Rows(NamedTuple):
    """The rows of the batch on which a layer runs.

    Attributes:
      first: The first of these rows in the batch, int [].
      number: Their number.
      total: The number of rows of the batch.
      axes: The axes of the mesh over which the batch is sharded.
    """

    first: jax.Array
    number: int
    total: int
    axes: Collection[str]


class EquationPair(NamedTuple):
    """One equation, on symbolic rows and on those of one device."""

    symbolic: Equation
    eqn: Equation


def run(loop: EquationPair, args: Sequence[Any], rows: Rows) -> list[Any]:
    """Runs one iteration of a loop over layers on some rows of the batch.

    Args:
      loop: The loop.
      args: The arguments of its body.
      rows: The rows.

    Raises:
      ValueError: Random numbers are drawn by another generator, or a ``shard_map`` divides arrays
        over axes of the user's.
    """
    symbolic, jaxpr = (jaxprs.scan_parts(each).body for each in loop)
    if contains(loop.eqn, _is_special):
        return _evaluate(symbolic, jaxpr, args, rows)
    return jaxprs.evaluate(jaxpr, args, jaxprs.bind_anywhere, lambda eqn: False)


def _evaluate(symbolic: AnyJaxpr, closed: AnyJaxpr, args: Sequence[Any], rows: Rows) -> list[Any]:
    """Runs a program on some rows of the batch, equation by equation the symbolic one. Programs
    inside it are opened: their variables may name the mesh outside of the pipeline."""
    pairs = zip(*(jaxprs.open_jaxpr(x)[0].eqns for x in (symbolic, closed)), strict=True)
    symbolic_of = {id(eqn): EquationPair(of, eqn) for of, eqn in pairs}

    def run(eqn: Equation, values: list[Any]) -> Sequence[Any]:
        with jaxprs.named_as(eqn):
            return _run(symbolic_of[id(eqn)], values, rows)

    return jaxprs.evaluate(closed, args, run, lambda eqn: False)


def _run(pair: EquationPair, values: Sequence[Any], rows: Rows) -> Sequence[Any]:
    symbolic, eqn = pair
    if eqn.primitive in jaxprs.CALLS:
        bodies = jaxprs.called_jaxpr(symbolic), jaxprs.called_jaxpr(eqn)
        return _evaluate(*bodies, values, rows)
    if eqn.primitive in _LOOPS:
        return _LOOPS[eqn.primitive](pair, values, rows)
    if eqn.primitive is prims.sharding_constraint_p:
        return [_constrained(eqn, values[0], rows.axes)]
    if eqn.primitive.name == "shard_map":
        if set(jaxprs.param(eqn, "newly_manual_axes")) <= {*rows.axes}:
            body = jaxprs.param(eqn, "jaxpr")
            return jaxprs.evaluate(body, values, run=jaxprs.bind_anywhere)
        raise ValueError(
            f"a layer with shard_map ({where(eqn)}) cannot run in pipeline stages: remove `sharded`"
        )
    if eqn.primitive.name in DRAWS and (dims := growing(symbolic.outvars[0])):
        return [_drawn(eqn, values, dims[0], rows)]
    return jaxprs.bind_anywhere(eqn, values)


def _scan(pair: EquationPair, values: Sequence[Any], rows: Rows) -> list[Any]:
    symbolic, loop = map(jaxprs.scan_parts, pair)
    consts, start, stacks = loop.operands(values)

    def body(carry: list[Any], entries: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = _evaluate(symbolic.body, loop.body, [*consts, *carry, *entries], rows)
        return outs[: loop.carry], outs[loop.carry :]

    length, reverse = loop.length, loop.reverse
    carry, stacked = lax.scan(body, [*start], [*stacks], length=length, reverse=reverse)
    return [*carry, *stacked]


def _while(pair: EquationPair, values: Sequence[Any], rows: Rows) -> list[Any]:
    symbolic, loop = map(jaxprs.while_parts, pair)
    a = loop.cond_consts
    b = a + loop.body_consts

    def goes_on(carry: list[Any]) -> Any:
        return _evaluate(symbolic.cond, loop.cond, [*values[:a], *carry], rows)[0]

    def body(carry: list[Any]) -> list[Any]:
        return _evaluate(symbolic.body, loop.body, [*values[a:b], *carry], rows)

    return lax.while_loop(goes_on, body, list(values[b:]))


def _cond(pair: EquationPair, values: Sequence[Any], rows: Rows) -> list[Any]:
    def branch(symbolic: AnyJaxpr, closed: AnyJaxpr) -> Callable[..., list[Any]]:
        return lambda *operands: _evaluate(symbolic, closed, operands, rows)

    branches = map(branch, *(jaxprs.param(each, "branches") for each in pair))
    index, *operands = values
    outs: list[Any] = lax.switch(index, [*branches], *operands)
    return outs


_LOOPS = {prims.scan_p: _scan, prims.while_p: _while, prims.cond_p: _cond}


def _is_special(eqn: Equation) -> bool:
    name = eqn.primitive.name
    return name in DRAWS or name in ("shard_map", "sharding_constraint")


def _constrained(eqn: Equation, value: Any, axes: Collection[str]) -> Any:
    """Constrains a value to the axes that its spec has beside those of the batch."""
    sharding, free = jaxprs.param(eqn, "sharding"), PartitionSpec.UNCONSTRAINED
    if not isinstance(sharding, NamedSharding):
        return value
    entries: list[Any] = []
    for entry in layout.full(sharding.spec, value.ndim):
        kept = () if entry is free else tuple(a for a in layout.axes(entry) if a not in axes)
        entries.append(kept or (free if entry is free or entry else None))
    named = any(isinstance(entry, tuple) for entry in entries)
    # A spec alone, for the mesh of the surrounding shard_map, whose axes are manual in part.
    return lax.with_sharding_constraint(value, PartitionSpec(*entries)) if named else value


def _drawn(eqn: Equation, values: Sequence[jax.Array], dim: int, rows: Rows) -> jax.Array:
    """Draws the random bits of some rows; ``dim`` is the dimension that holds the rows."""
    if len(jaxprs.param(eqn, "shape", ())) < eqn.outvars[0].aval.ndim:
        return jaxprs.bind_anywhere(eqn, values)[0]  # every row has a key
    (key,) = values
    known = eqn.primitive.name == "random_bits" and str(jax.random.key_impl(key)) == _GENERATOR
    config: Any = jax.config
    if not (known and config.jax_threefry_partitionable):
        raise ValueError(
            f"a layer draws random numbers ({where(eqn)}) that pipeline stages cannot draw by "
            "rows: use jax_default_prng_impl=threefry2x32 and jax_threefry_partitionable=True"
        )
    shape, each = eqn.outvars[0].aval.shape, eqn.outvars[0].aval.shape[dim] // rows.number
    # The position of an element is (outer * size + row) * inner + rest, in 64 bits.
    inner = math.prod(shape[dim + 1 :])
    outer, row, rest = (
        jnp.arange(n, dtype=jnp.uint32) for n in (math.prod(shape[:dim]), shape[dim], inner)
    )
    row += rows.first.astype(jnp.uint32) * np.uint32(each)
    high, low = _product(outer[:, None] * np.uint32(each * rows.total) + row, inner)
    position = low[..., None] + rest
    # A sum of unsigned integers that is smaller than a term has overflowed.
    high = high[..., None] + (position < rest).astype(jnp.uint32)
    one, two = jax.random.key_data(key)
    counts = [x.reshape(shape) for x in (high, position)]
    # As jax's threefry_random_bits with jax_threefry_partitionable: counters are positions in 64
    # bits, 64 bits take both words, and fewer take their xor.
    bits = threefry2x32_p.bind(one, two, *counts)
    width, dtype = jaxprs.param(eqn, "bit_width"), eqn.outvars[0].aval.dtype
    if width == 64:
        return bits[0].astype(dtype) << np.uint64(32) | bits[1].astype(dtype)
    return (bits[0] ^ bits[1]).astype(dtype)


def _product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low 32 bits of the products of 32-bit numbers."""
    # By halves, because JAX has no 64-bit integers unless jax_enable_x64 is set.
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & mask, np.uint32(b >> 16), np.uint32(b & 0xFFFF)
    middle = a1 * b0 + (a0 * b0 >> half)
    other = a0 * b1 + (middle & mask)
    return a1 * b1 + (middle >> half) + (other >> half), a * np.uint32(b)
