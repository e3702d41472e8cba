"""The errors of sent gradients in a state, as arrays: those that the state has, or zeros.

:mod:`zerojax.plan.errors` plans these arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import PyTreeDef

from zerojax.accumulation.exchange import Exchange
from zerojax.config import ConfigError, ZeroConfig
from zerojax.devices.mesh import batch_axes, batch_devices
from zerojax.distributed import log
from zerojax.plan.layout import Spec
from zerojax.plan.planning import parameter_leaves
from zerojax.train_state.state_parts import Parts
from zerojax.xla.types import PyTree


def with_errors(
    parts: Parts,
    exchange: Exchange | None,
    own: Sequence[Spec | None],
    mesh: Mesh,
    axis: str,
    config: ZeroConfig,
) -> Parts:
    """Returns a state with the errors that an exchange keeps: the state's own if they fit, or
    zeros.

    Args:
      parts: A state with a wrapped optimizer state.
      exchange: The exchange of gradients; None for ordinary sums, which have no errors.
      own, mesh, axis, config: See :func:`zerojax.plan.planning.make_plan`.

    Raises:
      ConfigError: The mesh has an axis over which the batch is not split.
    """
    current = parts.opt_state.error
    if exchange is None or not exchange.applies_to(parts.opt_state.inner):
        return parts if current is None else _with(parts, None)
    _check_rows(exchange.key, mesh)
    leaves = parameter_leaves(parts.params, own, mesh, axis, config)
    tree = jax.tree.structure(parts.params)
    wanted = jax.tree.unflatten(tree, exchange.errors_of(leaves))
    if _shapes(current) == _shapes(wanted):
        return parts
    if current is not None:
        log.warning("%s: errors of other devices start from zero.", exchange.key)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(parts))
    # NumPy zeros take no memory until each device receives its shard.
    zeros = jnp.zeros if traced else np.zeros
    return _with(parts, jax.tree.map(lambda x: zeros(x.shape, x.dtype), wanted))


def _check_rows(key: str, mesh: Mesh) -> None:
    """Refuses a mesh on which devices share the rows of the batch."""
    if batch_devices(mesh) != mesh.size:
        others = {a: n for a, n in mesh.shape.items() if a not in batch_axes(mesh) and n > 1}
        raise ConfigError(
            f"{key}: the axes {others} of the mesh divide no rows of the batch, and error feedback "
            "has each device sum up rows of its own; take the key or these axes out"
        )


def _with(parts: Parts, error: PyTree) -> Parts:
    return parts._replace(opt_state=parts.opt_state._replace(error=error))


def _shapes(tree: PyTree) -> tuple[PyTreeDef, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [tuple(x.shape) for x in leaves]
