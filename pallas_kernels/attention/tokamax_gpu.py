"""tokamax's attention for Hopper and newer GPUs, written in Pallas (Mosaic GPU)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import compat
from pallas_kernels.attention.seen import Seen
from pallas_kernels.dispatch import Target

SAVED = "attention"
"""Name of the result and of the softmax's sums, for ``jax.checkpoint`` policies."""

SCOPE = "fused_attention"
"""Named scope of the kernels, with pass and window appended; a forecast counts products by it."""

_KINDS = ("H100", "H200", "GH200", "B100", "B200", "GB200")
_WIDEST = 256
_INSTALL = (
    "tokamax is not installed: pip install -e '.[attention]' (Python 3.12 or newer, jax 0.11.1 "
    "or newer)"
)


def refusal(at: Target, q: Any, dropout: float) -> str | None:
    """Returns the reason why the kernel cannot run, or None if it can."""
    if at.platform != "gpu" or not any(kind in at.kind for kind in _KINDS):
        return f"needs an NVIDIA GPU, Hopper or newer, and this runs on {at.platform} ({at.kind})"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, and q, k and v are {q.dtype}"
    if dropout:
        return "has no dropout"
    if q.shape[-1] > _WIDEST:
        return f"takes heads of {_WIDEST} at the most, and d is {q.shape[-1]}"
    try:
        package()
    except ImportError:
        return f"cannot run: {_INSTALL}"
    if compat.default_device().platform != "gpu":
        return (
            f"needs a device to ask for its kind, and {at.kind} is absent: trace the function "
            "within jax.default_device(mesh.devices.flat[0])"
        )
    return None


def package() -> Any:
    """Imports and returns tokamax.

    Raises:
      ImportError: tokamax is not installed.
    """
    try:
        return importlib.import_module("tokamax")
    except ModuleNotFoundError as error:
        if error.name != "tokamax":
            raise
        raise ImportError(f"attention: {_INSTALL}. Or leave `implementation` None.") from error


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    seen: Seen,
    scale: float | None,
) -> jax.Array:
    """Computes :func:`pallas_kernels.attention`.

    The result and the softmax's sums are saved for the backward pass under the name ``SAVED``.
    """
    device_context = _device_context()
    seen_keys = "_causal" if seen.is_causal else ""
    if seen.window is not None:
        seen_keys += f"_of_{seen.window}"
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def operation(q: jax.Array, k: jax.Array, v: jax.Array, others: Any) -> Any:
        bias, mask, first, behind = others
        op = compat.tokamax_attention()
        bound = op.bind(q, k, v, bias=bias, mask=mask, is_causal=seen.is_causal, logits_scale=scale)
        keys = dataclasses.replace(bound.kwargs["mask"], k_start=first, k_end=behind)
        return op, op.bind(q, k, v, bias=bias, mask=keys, logits_scale=scale)

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, others: Any) -> tuple[jax.Array, Any]:
        with device_context(), jax.named_scope(SCOPE + seen_keys):
            op, bound = operation(q, k, v, others)
            out, sums = op(
                q, k, v, bias=others[0], mask=bound.kwargs["mask"], logits_scale=scale,
                return_residuals=True,
            )  # fmt: skip
        # Otherwise XLA runs the kernel twice if a loop saves its results: for the copy and the use.
        out, sums = jax.lax.optimization_barrier((out, sums))
        out, sums = jax.tree.map(lambda x: checkpoint_name(x, SAVED), (out, sums))
        return out, (q, k, v, others, out, sums)

    def backward(residuals: Any, gradient: jax.Array) -> Any:
        q, k, v, others, out, sums = residuals
        with device_context(), jax.named_scope(f"{SCOPE}_backward{seen_keys}"):
            op, bound = operation(q, k, v, others)
            options = {x: y for x, y in bound.kwargs.items() if x != "return_residuals"}
            grads = op.vjp(sums, out, gradient, *bound.args, **options)
        bias = None if others[0] is None else grads["bias"].astype(others[0].dtype)
        return grads["q"], grads["k"], grads["v"], (bias, None, None, None)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(q, k, v, (bias, mask, *seen.range_of_keys()))


def _device_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context in which tokamax compiles for the current default device.

    The backward pass is traced later, when the default device may differ.
    """
    device, config = compat.default_device(), package().config
    is_present = bool(device.addressable_memories())

    @contextlib.contextmanager
    def device_context() -> Iterator[None]:
        # Tuning a kernel for a device changes neither results nor memory.
        untuned = contextlib.nullcontext() if is_present else config.ignore_autotuning_cache(True)
        with jax.default_device(device), config.cross_compile(not is_present), untuned:
            yield

    return device_context
