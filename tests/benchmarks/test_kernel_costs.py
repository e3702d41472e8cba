"""The benchmark of the kernels: what it compiles without a GPU, and how it tells the figures."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels import CALLS, cost
from pallas_kernels import rms_norm
from pallas_kernels.arguments import Measured


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
