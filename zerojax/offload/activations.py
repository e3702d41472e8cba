"""Activations kept on the host until the backward pass: by config, or by name in a block.

With ``activation_checkpointing.cpu_checkpointing`` the residuals of rematerialised blocks in a scan
are sent to the host, see :mod:`zerojax.collectives.residuals`. :func:`remat_policy` chooses the
residuals of any block, and can send them to the host.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

import jax

from zerojax.config import ZeroConfig
from zerojax.plan.places import PINNED

SMALLEST = 2**16
"""The fewest elements per device of a residual that is sent to the host: in bf16 they take two
microseconds at 55 GB/s, about as long as the start of a copy."""

_PLAIN = {
    "nothing": "nothing_saveable",
    "everything": "everything_saveable",
    "dots": "dots_saveable",
    "dots_no_batch": "dots_with_no_batch_dims_saveable",
}
_OFFLOADED_DOTS = "offload_dots_no_batch"
_NAMED = ("names", "offload")


def smallest_away(config: ZeroConfig) -> int | None:
    """Returns the fewest elements per device of an offloaded residual; None without offload."""
    return SMALLEST if config.cpu_checkpointing else None


def remat_policy(policy: str) -> Callable[..., bool]:
    """Returns a ``jax.checkpoint`` policy by name: the residuals that a rematerialised block keeps.

    Args:
      policy: One of

        - ``"nothing"``: only the block's inputs,
        - ``"everything"``: all that the backward pass needs,
        - ``"dots"``: the inputs, and results of matrix products,
        - ``"dots_no_batch"``: the inputs, and results of matrix products without batch dimensions,
          so without attention scores,
        - ``"offload_dots_no_batch"``: the same results, but in host memory until the backward pass,
        - ``"names:a,b"``: arrays that ``jax.ad_checkpoint.checkpoint_name`` calls ``a`` or ``b``,
        - ``"offload:a,b"``: these arrays, but in host memory until the backward pass.

    Raises:
      ValueError: no such policy exists, or no name follows the colon.

    Example:
      >>> import jax, jax.numpy as jnp, zerojax
      >>> from flax import linen as nn
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> class Block(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         h = checkpoint_name(nn.Dense(64)(x), "hidden")
      ...         return nn.Dense(16)(nn.gelu(h))
      >>> block = nn.remat(Block, policy=zerojax.remat_policy("offload:hidden"))()
      >>> x = jnp.ones((4, 16))
      >>> params = block.init(jax.random.key(0), x)
      >>> grads = jax.jit(jax.grad(lambda p: block.apply(p, x).sum()))(params)
      >>> grads["params"]["Dense_0"]["kernel"].shape
      (16, 64)
    """
    policies = jax.checkpoint_policies
    kind, colon, rest = policy.partition(":")
    if not colon and kind in _PLAIN:
        plain: Callable[..., bool] = getattr(policies, _PLAIN[kind])
        return plain
    if policy == _OFFLOADED_DOTS:
        return policies.offload_dot_with_no_batch_dims("device", PINNED)
    if kind not in _NAMED or not colon:
        known = {name: name for name in (*_PLAIN, _OFFLOADED_DOTS)}
        known |= {name: f"{name}:a,b" for name in _NAMED}
        close = difflib.get_close_matches(kind, known, n=1)
        hint = f"; did you mean {known[close[0]]!r}?" if close else "."
        available = ", ".join(map(repr, known.values()))
        raise ValueError(f"no remat policy {policy!r}{hint} There are {available}.")
    names = [name.strip() for name in rest.split(",")]
    if not all(names):
        raise ValueError(
            f"remat policy {policy!r} lacks a name: write '{kind}:a,b', names of checkpoint_name."
        )
    if kind == "names":
        return policies.save_only_these_names(*names)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst=PINNED,
    )
