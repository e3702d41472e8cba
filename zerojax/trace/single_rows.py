"""Products of one row with a small matrix, computed for two equal rows.

XLA for GPUs writes a small product of one row as an elementwise product and a sum over rows of the
matrix. Where that sum has few columns, too few to read memory at its full bandwidth, XLA writes the
elementwise product to memory in float32, and reads it again: up to five times the bytes of the
matrix. A product of two rows stays a matrix product, which reads the matrix once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
from jax import lax
from jax.sharding import Mesh

from zerojax.devices.mesh import batch_devices
from zerojax.devices.rates import rates_of
from zerojax.graph.contractions import Contraction
from zerojax.xla import jaxprs
from zerojax.xla.compiler import GPUS
from zerojax.xla.rewriter import Rewriter, replaced
from zerojax.xla.types import AnyJaxpr, Equation, Jaxpr

# Elements of a matrix from which on XLA keeps a product of one row.
LEAST_PRODUCT = 10_000_000

# Bytes a second that XLA expects from a sum over rows, for each column; measured for A10G, A100,
# H100, H200 and B200 with jax 0.10.2.
COLUMN_BANDWIDTH = 1.1e9


class SmallProducts(NamedTuple):
    """The products of one row that XLA writes to memory, in sizes over all devices; hashable.

    Attributes:
      devices: Number of devices that share the rows of a batch.
      elements: The matrix has fewer elements.
      columns: The matrix has fewer columns.
    """

    devices: int
    elements: int
    columns: int

    @classmethod
    def on(cls, mesh: Mesh) -> Self | None:
        """Returns the products on a mesh's devices; None unless they are GPUs."""
        device, devices = mesh.devices.flat[0], batch_devices(mesh)
        if device.platform not in GPUS:
            return None
        # Devices that do not share the rows share the matrix (tensor parallelism).
        shards = mesh.size // devices
        columns = int(rates_of(device, 0).bandwidth / COLUMN_BANDWIDTH)
        return cls(devices, shards * LEAST_PRODUCT, shards * columns)


def with_repeated_rows(closed: AnyJaxpr, products: SmallProducts) -> AnyJaxpr:
    """Returns a traced program whose small products of one row on each device compute two equal
    rows, and drop the second. Only the rounding of results may differ.

    Products of 32-bit floats are left. Calls, loops and branches are entered.

    Args:
      closed: The program's jaxpr and its constants.
      products: The products.

    Example:
      >>> import jax.numpy as jnp
      >>> x, matrix = jnp.ones((1, 4), "bfloat16"), jnp.ones((4, 8), "bfloat16")
      >>> traced = jax.make_jaxpr(jnp.matmul)(x, matrix)
      >>> new = with_repeated_rows(traced, SmallProducts(1, elements=100, columns=100))
      >>> [eqn.outvars[0].aval.shape for eqn in new.eqns]  # two rows, their product, its first row
      [(2, 4), (2, 8), (1, 8)]
    """
    return _Products(products)(closed)


class _Products(Rewriter):
    """Rewrites products."""

    def __init__(self, products: SmallProducts) -> None:
        super().__init__()
        self._products = products

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        if (product := Contraction.of(eqn)) is not None:
            for side in (0, 1):
                if (axis := _single_row(product, side, self._products)) is not None:
                    return _repeated(product, side, axis)
        return super().equation(eqn, jaxpr)


def _single_row(product: Contraction, side: int, products: SmallProducts) -> int | None:
    """Returns a dimension of size 1 to repeat, if the operand has one row on each device and the
    other one is a small matrix; else None."""
    row, matrix = (product.eqn.invars[i].aval for i in (side, 1 - side))
    # A matrix product may round 32-bit operands, as an elementwise product does not.
    if any(product.batched) or max(row.dtype.itemsize, matrix.dtype.itemsize) > 2:
        return None
    free = product.free(side)
    rows = [d for d in free if row.shape[d] == 1]
    columns = math.prod(matrix.shape[d] for d in product.free(1 - side))
    # One row that all devices have, or one on each of those that share the batch.
    is_single = math.prod(row.shape[d] for d in free) in (1, products.devices)
    is_small = 1 < columns < products.columns and matrix.size < products.elements
    return rows[-1] if rows and is_single and is_small else None


def _repeated(product: Contraction, side: int, axis: int) -> list[Equation]:
    """Returns a product of two rows along the dimension `axis` of an operand, and its first."""
    eqn, at = product.eqn, product.places(side)[axis]

    def run(*operands: jax.Array) -> jax.Array:
        two = [*operands]
        row = two[side]
        shape = [2 if d == axis else n for d, n in enumerate(row.shape)]
        two[side] = lax.broadcast_in_dim(row, shape, range(row.ndim))
        (result,) = jaxprs.bind(eqn, two)
        return lax.slice_in_dim(result, 0, 1, axis=at)

    return replaced(eqn, run, eqn.invars)
