"""The attention of the models here, fused: by which implementation, on which devices.

Llama(config, attention=fused_attention(zero))
GPT(config, attention=fused_attention(zero, cut={"model": 2}))     # heads cut over "model"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.attention import tokamax_gpu
from pallas_kernels.dispatch import Target
from zerojax.api import Zero
from zerojax.devices.mesh import SEQUENCE, are_there
from zerojax.models.assumed_attention import assumed_attention

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
ASKED = ("auto", "mosaic_gpu", "cudnn", "plain")


def fused_attention(
    zero: Zero,
    implementation: str | None = None,
    *,
    cut: Mapping[str, int] | None = None,
    sliding_window: int | None = None,
) -> Attention:
    """Causal attention of q [B, T, H, d] on k and v [B, T, G, d], each device on its own rows.

    Args:
      zero: Knows the mesh.
      implementation: As for :func:`pallas_kernels.attention`.
      cut: Of axes of the mesh, see :meth:`zerojax.Zero.per_device`: ``{"model": 2}`` where heads
        are cut over "model".
      sliding_window: A position sees the last so many, itself among them.
    """

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pallas_kernels.attention(
            q, k, v, is_causal=True, sliding_window=sliding_window, implementation=implementation
        )

    return zero.per_device(attention, cut=_heads_cut(zero, cut))


def _heads_cut(zero: Zero, cut: Mapping[str, int] | None) -> dict[str, int]:
    """``cut``, and the axis "seq" with the dimension of heads, which it cuts around attention."""
    return {**(cut or {}), **({SEQUENCE: 2} if zero.sequence else {})}


def chosen(zero: Zero | None, asked: str) -> str:
    """The implementation for a model that is planned: ``"mosaic_gpu"``, ``"cudnn"`` or ``"plain"``.

    Args:
      zero: Knows the devices, which need not exist; None plans for none.
      asked: One of them, or ``"auto"``: a fused one where it compiles, else the model's own.
        cuDNN's does only where the devices exist; asked for by name it is assumed for absent ones
        (:mod:`zerojax.models.assumed_attention`).

    Raises:
      ValueError: There is no such implementation.
    """
    if asked not in ASKED:
        raise ValueError(f"attention: {asked!r} is unknown; there are {', '.join(ASKED)}")
    if asked != "auto":
        return asked
    if zero is None or not (zero.config.bf16 or zero.config.fp16):
        return "plain"
    device = zero.mesh.devices.flat[0]
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    head = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.bfloat16)
    with jax.default_device(device):
        if tokamax_gpu.refusal(Target(platform, device.device_kind), head, 0.0) is None:
            return "mosaic_gpu"
    return "cudnn" if are_there(zero.mesh) and platform == "gpu" else "plain"


def planned_attention(
    zero: Zero | None, asked: str, cut: Mapping[str, int] | None = None
) -> Attention | None:
    """The attention that :func:`chosen` names, for a model; None for the model's own. ``cut`` as
    for :func:`fused_attention`."""
    name = chosen(zero, asked)
    if zero is None or name == "plain":
        return None
    if name == "cudnn" and not are_there(zero.mesh):
        heads = _heads_cut(zero, cut)
        return assumed_attention(functools.partial(zero.per_device, cut=heads))
    return fused_attention(zero, name, cut=cut)
