"""Fused attention for ``zerojax.models``, and the choice of its implementation.

Llama(config, attention=fused_attention(zero))
GPT(config, attention=fused_attention(zero, sharded={"model": 2}))     # heads sharded over "model"
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.attention import tokamax_gpu
from pallas_kernels.dispatch import Target
from zerojax.api import Zero
from zerojax.devices.mesh import SEQUENCE, are_present
from zerojax.models.assumed_attention import assumed_attention
from zerojax.models.blocks import Attention
from zerojax.models.kernels import fused_causal_attention

ASKED = ("auto", "mosaic_gpu", "cudnn", "plain")


def fused_attention(
    zero: Zero,
    implementation: str | None = None,
    *,
    sharded: Mapping[str, int] | None = None,
    sliding_window: int | None = None,
) -> Attention:
    """Returns causal attention of q [B, T, H, d] to k and v [B, T, G, d], run per device on rows.

    The function also takes the keyword ``mask``, bool [B, T], False on padding; every
    implementation supports it.

    Args:
      zero: The decorator, which has the mesh.
      implementation: As for :func:`pallas_kernels.attention`.
      sharded: Dimensions sharded over mesh axes, see :meth:`zerojax.Zero.per_device`:
        ``{"model": 2}`` if heads are sharded over "model".
      sliding_window: The number of positions that a position attends to, the last of them itself.
    """

    attention = functools.partial(
        fused_causal_attention, window=sliding_window, implementation=implementation
    )
    per_device = zero.per_device(attention, sharded=_sharded_heads(zero, sharded))
    return lambda q, k, v, mask=None: per_device(q, k, v, mask)


def _sharded_heads(zero: Zero, sharded: Mapping[str, int] | None) -> dict[str, int]:
    """Adds the axis "seq" to ``sharded``; around attention it shards the dimension of heads."""
    return {**(sharded or {}), **({SEQUENCE: 2} if zero.sequence else {})}


def choose_attention(zero: Zero | None, asked: str) -> str:
    """Chooses the implementation for a planned model: "mosaic_gpu", "cudnn" or "plain".

    Args:
      zero: The decorator, whose devices need not exist; None to plan without devices.
      asked: An implementation, or ``"auto"``: a fused one if the config computes in 16 bits and the
        implementation compiles for the devices, else the model's. cuDNN's compiles only if the
        devices exist; if requested by name for absent devices, it is assumed
        (:mod:`zerojax.models.assumed_attention`).

    Raises:
      ValueError: The implementation is unknown.
    """
    if asked not in ASKED:
        raise ValueError(f"attention: {asked!r} is unknown; there are {', '.join(ASKED)}")
    if asked != "auto":
        return asked
    if zero is None or not (zero.config.bf16 or zero.config.fp16):
        return "plain"
    device = zero.mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    query = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.bfloat16)
    with jax.default_device(device):
        if tokamax_gpu.refusal(Target(platform, device.device_kind), query, 0.0) is None:
            return "mosaic_gpu"
    return "cudnn" if are_present(zero.mesh) and platform == "gpu" else "plain"


def planned_attention(
    zero: Zero | None, asked: str, sharded: Mapping[str, int] | None = None
) -> Attention | None:
    """Returns the attention that :func:`choose_attention` chooses, or None for the model's default.

    ``sharded`` is as for :func:`fused_attention`.
    """
    name = choose_attention(zero, asked)
    if zero is None or name == "plain":
        return None
    if name == "cudnn" and not are_present(zero.mesh):
        heads = _sharded_heads(zero, sharded)
        return assumed_attention(functools.partial(zero.per_device, sharded=heads))
    return fused_attention(zero, name, sharded=sharded)
