"""The plan of errors: arrays of what devices did not send of their gradients, for the next update.

:class:`zerojax.accumulation.exchange.Exchange` determines these arrays. No module of this name has
exceptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.devices.mesh import batch_axes
from zerojax.plan import layout
from zerojax.plan.leaf import Leaf
from zerojax.plan.table import size
from zerojax.xla.types import Shaped


def error_leaf(path: str, x: Shaped, mesh: Mesh) -> Leaf:
    """Builds the leaf of an error, of which each device stores its own row, or of a message that
    was sent to all devices and that each stores. Messages are integers, or have one dimension."""
    replicated = (None,) * len(x.shape)
    if not jnp.issubdtype(x.dtype, jnp.floating) or len(x.shape) == 1:
        return Leaf.of(path, x, replicated, replicated, "is what all devices were sent", mesh)
    spec = layout.cutting((batch_axes(mesh), *replicated[1:]), mesh)
    return Leaf.of(path, x, spec, replicated, "", mesh)


def note(key: str, errors: Sequence[Leaf], gradients: Sequence[Leaf]) -> str:
    """Returns a sentence on the memory that errors take.

    Args:
      key: The config key that asks for them.
      errors: The leaves of the errors.
      gradients: The leaves of the gradients, as they are accumulated.
    """
    if not errors:
        return f"{key}: no gradient is sent quantized, so that there is no error to feed back"
    error_bytes = sum(leaf.bytes_per_device for leaf in errors)
    gradient_bytes = sum(math.prod(leaf.shape) * 4 for leaf in gradients)
    return (
        f"{key}: each device holds the errors of its own gradients, {size(error_bytes)}, and "
        f"unsharded gradients until the update, {size(gradient_bytes)}"
    )
