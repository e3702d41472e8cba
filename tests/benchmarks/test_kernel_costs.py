"""The benchmark of the kernels: what it compiles without a GPU, and how it tells the figures."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernel_peers import peers
from benchmarks.kernel_times import timed
from benchmarks.kernels import CALLS, Cost, answer, cost, rows
from pallas_kernels import rms_norm
from pallas_kernels.arguments import Measured

FAST = Cost(
    kernel="toy",
    shape="4",
    implementation="mosaic_gpu",
    bytes=8 * 10**9,
    flops=0,
    launches=1,
    temporaries=0,
    compile_seconds=1.0,
    seconds=0.004,
)
SLOW = dataclasses.replace(FAST, implementation="xla", launches=0, seconds=0.006)


def test_rates_are_beside_a_copy_and_beside_xla() -> None:
    _, fast, slow = rows([FAST, SLOW], copy=2.5e12)
    assert fast[-3:] == ["4.000", "80%", "1.50"]
    assert slow[-3:] == ["6.000", "53%", "1.00"]


def test_what_was_not_timed_is_owed() -> None:
    bare = dataclasses.replace(FAST, seconds=None)
    assert rows([bare], None)[1][-3:] == ["owed", "owed", "owed"]
    assert "**all timings are owed**" in answer([bare], None).parts[0]


def test_every_kernel_is_measured() -> None:
    assert {call.kernel for call in CALLS} == {
        "layer_norm",
        "rms_norm",
        "softmax_cross_entropy",
        "quantize_blockwise",
        "dequantize_blockwise",
    }


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_a_call_is_compiled_for_a_gpu_that_is_not_there() -> None:
    call = Measured(
        "toy",
        "8 x 128",
        lambda name: lambda x: rms_norm(x, x[0], implementation=name),
        (jax.ShapeDtypeStruct((8, 128), jnp.float32),),
        bytes=4 * 8 * 128,
    )
    found = [cost(call, name, 1, here=False) for name in ("mosaic_gpu", "xla")]
    assert [each.launches for each in found] == [1, 0]
    assert all(each.seconds is None for each in found)


def _small(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(min(n, 128) for n in x.shape), x.dtype)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.kernel} {call.shape}")
def test_torch_makes_the_same_call(call: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", lambda formula: formula)  # takes minutes
    small = dataclasses.replace(call, arguments=jax.tree.map(_small, call.arguments))
    for name, once in peers(small, "cpu"):
        if name == "torch":
            made = once()
            gradients = made if isinstance(made, tuple) else (made,)
            assert all(bool(torch.isfinite(x).all()) for x in gradients)


def test_short_calls_are_timed_in_a_row() -> None:
    calls = []
    seconds = timed(
        Measured("toy", "1", lambda _: len, (jax.ShapeDtypeStruct((1,), jnp.float32),), 4),
        lambda x: calls.append(1) or x,
    )
    assert seconds > 0
    assert len(calls) > 100
