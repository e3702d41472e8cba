"""Error feedback in a state: its existing errors of quantized gradients, or zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from zerojax.config import ZeroConfig
from zerojax.distributed import log
from zerojax.optim.one_bit import one_bit_state
from zerojax.plan.error_feedback import errors_of, key_of
from zerojax.plan.planning import parameter_leaves
from zerojax.train_state.state_parts import Parts


def with_errors(
    parts: Parts, own: Sequence[Any], mesh: Mesh, axis: str, config: ZeroConfig
) -> Parts:
    """Returns a state with the errors that the config asks for: its own if they fit, or zeros.

    Args:
      parts: A state with a wrapped optimizer state.
      own, mesh, axis, config: See :func:`zerojax.plan.planning.make_plan`.
    """
    current = parts.opt_state.error
    is_one_bit = one_bit_state(parts.opt_state.inner) is not None
    if config.zeropp_loco_param is None and not (is_one_bit and key_of(config)):
        return parts if current is None else _with(parts, None)
    leaves = parameter_leaves(parts.params, own, mesh, axis, config)
    tree = jax.tree.structure(parts.params)
    wanted = jax.tree.unflatten(tree, errors_of(config, leaves, mesh, axis))
    if _shapes(current) == _shapes(wanted):
        return parts
    if current is not None:
        log.warning("%s: errors of other devices start from zero.", key_of(config))
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(parts))
    # NumPy zeros take no memory until each device receives its shard.
    zeros = jnp.zeros if traced else np.zeros
    return _with(parts, jax.tree.map(lambda x: zeros(x.shape, x.dtype), wanted))


def _with(parts: Parts, error: Any) -> Parts:
    return parts._replace(opt_state=parts.opt_state._replace(error=error))


def _shapes(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [tuple(x.shape) for x in leaves]
