"""Calls of the kernels by torch, and by Liger where it is installed, on the GPU at hand."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from pallas_kernels.arguments import Measured

Peer = Callable[[], Any]


def peers(call: Measured, device: str = "cuda") -> Iterator[tuple[str, Peer]]:
    """Name and function of each way that torch knows to make a call; none without torch.

    "torch" is ``torch.compile`` of the plain formula. Norms' weights are in the dtype of x, which
    torch requires.
    """
    if importlib.util.find_spec("torch") is None:
        return
    torch: Any = importlib.import_module("torch")
    for name, formula in _formulas(torch, call.kernel):
        yield name, _run(torch, call, formula, device)


def _formulas(torch: Any, kernel: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The plain formula of a kernel, and Liger's if it is installed, by name.

    Each is a function of the call's arrays without the cotangent."""
    plain: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b, 1e-6),
        "rms_norm": lambda x, w: torch.nn.functional.rms_norm(x, w.shape, w, 1e-6),
        "softmax_cross_entropy": lambda h, w, y: torch.nn.functional.cross_entropy(
            h @ w.T, y, reduction="sum"
        ),
    }
    if kernel not in plain:
        return
    yield "torch", torch.compile(plain[kernel])
    if importlib.util.find_spec("liger_kernel") is None:
        return
    liger: Any = importlib.import_module("liger_kernel.transformers.functional")
    ways: dict[str, Callable[..., Any]] = {
        "layer_norm": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-6),
        "rms_norm": lambda x, w: liger.liger_rms_norm(x, w, 1e-6),
        "softmax_cross_entropy": lambda h, w, y: liger.liger_fused_linear_cross_entropy(
            h, w, y, reduction="sum"
        ),
    }
    if kernel in ways:
        yield "Liger", ways[kernel]


def _run(torch: Any, call: Measured, formula: Callable[..., Any], device: str) -> Peer:
    """The formula forward, and backward where the call goes there."""
    loss = call.kernel == "softmax_cross_entropy"
    backward = "backward" in call.shape
    arrays = call.arguments[:3] if loss else call.arguments[backward:]
    dtype = getattr(torch, call.arguments[0].dtype.name)

    def tensor(x: Any) -> Any:
        if x.dtype.kind in "iu":
            return torch.randint(0, 100, x.shape, device=device)
        return torch.rand(x.shape, device=device, dtype=dtype).requires_grad_(backward)

    inputs = [tensor(x) for x in arrays]
    of = [x for x in inputs if x.requires_grad]
    dy = None if loss or not backward else torch.rand_like(inputs[0])

    def once() -> Any:
        y = formula(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        return torch.autograd.grad(y, of, dy) if backward else y

    return once
