"""Blockwise quantisation: every implementation against the formula in float64."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.running import DTYPES, IMPLEMENTATIONS, compiled_for_h100, random, run

from pallas_kernels.compat import kernels_in
from pallas_kernels.quantize import Quantized, dequantize_blockwise, quantize_blockwise
from pallas_kernels.quantize.arguments import TESTED

pytestmark = pytest.mark.usefixtures("quick_compile")

KERNEL = "mosaic_gpu"
LIMIT = {8: 127, 4: 7}


def unpacked(q: Quantized) -> np.ndarray:
    """The codes [blocks, block_size], by the description of :class:`Quantized`."""
    values = np.asarray(q.values).astype(int)
    if q.bits == 8:
        return values
    low = values & 15
    return np.concatenate([np.where(low > 7, low - 16, low), values >> 4], axis=1)


def in_blocks(x: Any, block_size: int) -> np.ndarray:
    flat = np.float64(x).reshape(-1)
    return np.pad(flat, (0, -flat.size % block_size)).reshape(-1, block_size)


def both_ways(implementation: str, x: Any, dtype: Any = None, **keywords: Any) -> Any:
    def call(x: Any) -> Any:
        q = quantize_blockwise(x, **keywords, implementation=implementation)
        return q, dequantize_blockwise(q, dtype, implementation=implementation)

    return run(implementation, call, x)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("shape", "block_size", "dtype"), [(*t, DTYPES[i % 3]) for i, t in enumerate(TESTED)], ids=str
)
def test_formula(
    implementation: str, bits: int, shape: tuple[int, ...], block_size: int, dtype: Any
) -> None:
    x = random(shape, dtype)
    q, back = both_ways(implementation, x, bits=bits, block_size=block_size)
    lines = in_blocks(x, block_size)
    scale = np.abs(lines).max(1) / LIMIT[bits]
    assert q.values.dtype == jnp.int8
    assert q.values.shape == (len(lines), block_size * bits // 8)
    assert (q.shape, q.dtype, q.bits) == (shape, dtype, bits)
    np.testing.assert_allclose(q.scales, scale, rtol=3e-7)
    codes, exact = unpacked(q), lines / scale[:, None]
    # Half a step, and what float32 may be off.
    assert np.abs(codes - exact).max() < 0.5 + 1e-4
    np.testing.assert_array_equal(np.abs(codes).max(1), LIMIT[bits])
    assert (back.shape, back.dtype) == (shape, dtype)
    wanted = jnp.asarray(codes * np.float64(q.scales)[:, None], jnp.float32).astype(dtype)
    np.testing.assert_array_equal(back, wanted.reshape(-1)[: x.size].reshape(shape))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_has_the_right_mean(implementation: str, bits: int) -> None:
    """Of a few numbers, each many times; and what is a code already stays it."""
    steps = np.asarray([-3.0, -1.7, -0.25, 0.0, 0.1, 0.5, 2.9, LIMIT[bits]])
    blocks = 64
    x = jnp.asarray(np.tile(steps, (blocks, 16)), jnp.float32)
    q, back = both_ways(implementation, x, bits=bits, block_size=128, key=jax.random.key(0))
    codes = unpacked(q).reshape(-1, 8)
    mean, part = codes.mean(0), steps - np.floor(steps)
    spread = np.sqrt(part * (1 - part) / len(codes))
    assert (np.abs(mean - steps) <= 5 * spread + 1e-6).all(), mean
    assert (np.abs(codes - steps) < 1).all()
    assert np.abs(np.asarray(back).reshape(-1, 8).mean(0) - steps).max() < 0.1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_extremes(implementation: str, bits: int) -> None:
    """Zeros stay zeros; what is not finite is noticed in its block and nowhere else."""
    x = np.array(random((8, 128)))
    x[1] = 0.0
    x[2, 5], x[3, 0], x[4, 127] = np.inf, -np.inf, np.nan
    x[5] = 1e-42
    x[6] = np.sign(x[6]) * np.finfo(np.float32).max
    for key in (None, jax.random.key(0)):
        q, back = both_ways(implementation, jnp.asarray(x), bits=bits, block_size=128, key=key)
        assert np.isnan(q.scales[2:5]).all()
        assert np.isnan(back[2:5]).all()
        np.testing.assert_array_equal(q.scales[1], 0)
        np.testing.assert_array_equal(back[jnp.array([1, 5])], 0)
        good = np.asarray([0, 6, 7])
        assert np.isfinite(back[good]).all()
        step = np.abs(x[good]).max(1, keepdims=True) / LIMIT[bits]
        assert (
            np.abs(back[good] - x[good]) <= step * (1.0001 if key is not None else 0.5001)
        ).all()


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(("devices", "bits"), [(1, 8), (8, 4)])
def test_one_launch_each_on_h100(devices: int, bits: int) -> None:
    x = jax.ShapeDtypeStruct((2**20,), jnp.bfloat16)

    def call(x: Any) -> Any:
        key = jax.random.key(0)
        q, other = (
            quantize_blockwise(x, bits=bits, key=k, implementation="mosaic_gpu")
            for k in (None, key)
        )
        back = dequantize_blockwise(other, implementation="mosaic_gpu")
        return q.values, q.scales, back

    found = compiled_for_h100(call, x, devices=devices)
    assert kernels_in(found) == 3
    # What was drawn, and the codes and scales that do not leave.
    assert found.memory_analysis().temp_size_in_bytes < 3.2 * 2**20


def test_bad_input() -> None:
    x = jnp.ones(300)
    with pytest.raises(TypeError, match="x has dtype int32; only floats"):
        quantize_blockwise(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"x has shape \(0,\)"):
        quantize_blockwise(jnp.ones(0))
    with pytest.raises(ValueError, match="bits is 3; it must be 8 or 4"):
        quantize_blockwise(x, bits=3)
    for keywords in ({"block_size": 0}, {"block_size": 15, "bits": 4}):
        with pytest.raises(ValueError, match="it must be positive, and even for 4 bits"):
            quantize_blockwise(x, **keywords)
    q = quantize_blockwise(x)
    with pytest.raises(ValueError, match=r"do not make an array \(600,\)"):
        dequantize_blockwise(dataclasses.replace(q, shape=(600,)))
    with pytest.raises(ValueError, match=r"scales \(1,\)"):
        dequantize_blockwise(dataclasses.replace(q, scales=q.scales[:1]))
    with pytest.raises(TypeError, match="dtype is int8"):
        dequantize_blockwise(q, jnp.int8)
    small = quantize_blockwise(x, block_size=100)
    assert math.prod(small.values.shape) == 300
    with pytest.raises(ValueError, match="block_size is 100; 'mosaic_gpu' needs a multiple of 128"):
        run("mosaic_gpu", lambda x: quantize_blockwise(x, block_size=100, implementation=KERNEL), x)
    with pytest.raises(ValueError, match="the blocks have 100 elements"):
        run("mosaic_gpu", lambda q: dequantize_blockwise(q, implementation=KERNEL), small)
    for call in (
        lambda i: quantize_blockwise(x, implementation=i),
        lambda i: dequantize_blockwise(q, implementation=i),
    ):
        with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
            call(KERNEL)
        with pytest.raises(ValueError, match="unknown implementation 'triton'"):
            call("triton")
