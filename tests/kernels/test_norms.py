"""Layer norm and RMS norm: every implementation against the formulas in float64."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.running import (
    DTYPES,
    IMPLEMENTATIONS,
    assert_close,
    compiled_for_h100,
    random,
    with_gradients,
)

from pallas_kernels.compat import kernels_in
from pallas_kernels.norms import layer_norm, rms_norm
from pallas_kernels.norms.arguments import TESTED

pytestmark = pytest.mark.usefixtures("quick_compile")

EPS = 1e-3


def call_of(name: str, implementation: str) -> Callable[..., Any]:
    """Of x, scale, bias and a residual; RMS norm leaves the bias alone."""

    def call(x: Any, scale: Any, bias: Any, residual: Any) -> Any:
        more = {"residual": residual, "implementation": implementation, "eps": EPS}
        if name == "layer_norm":
            return layer_norm(x, scale, bias, **more)
        return rms_norm(x, scale, **more)

    return call


def formula(name: str, h: Any, scale: Any, bias: Any, dy: Any) -> list[Any]:
    """Result, and gradients of h, scale and bias."""
    h, scale, bias, dy = (np.float64(a) for a in (h, scale, bias, dy))
    layer = name == "layer_norm"
    centered = h - h.mean(-1, keepdims=True) if layer else h
    sigma = np.sqrt((centered**2).mean(-1, keepdims=True) + EPS)
    hat = centered / sigma
    g = dy * scale
    dh = g - hat * (g * hat).mean(-1, keepdims=True)
    dh = (dh - g.mean(-1, keepdims=True) if layer else dh) / sigma
    rows = tuple(range(h.ndim - 1))
    y, d_bias = hat * scale + (bias if layer else 0), dy.sum(rows)
    return [y, dh, (dy * hat).sum(rows), d_bias if layer else 0 * d_bias]


CASES = [(s, DTYPES[i % 3], i % 2 == 0) for i, s in enumerate(TESTED)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("shape", "dtype", "added"), CASES, ids=str)
def test_formula(implementation: str, name: str, shape: Any, dtype: Any, added: bool) -> None:
    x, dy, r, dh = (random(shape, dtype, seed) for seed in range(4))
    scale, bias = random(shape[-1:], jnp.float32, 4), random(shape[-1:], dtype, 5)
    residual, cotangents = (r, (dy, dh)) if added else (None, dy)
    call = call_of(name, implementation)
    result, (dx, *numbers, dr) = with_gradients(
        implementation, call, cotangents, x, scale, bias, residual
    )
    h = x
    if added:
        result, h = result
        assert_close(h, np.float64(x) + np.float64(r), dtype)
    y, wanted, *sums = formula(name, h, scale, bias, dy)
    wanted = wanted + np.float64(dh) if added else wanted
    assert (result.dtype, dx.dtype, h.dtype) == (dtype, dtype, dtype)
    # Where a row has one element, what is left of it is a difference of like numbers.
    most = max(1.0, np.abs(wanted).max())
    assert_close(result, y, dtype, scale=4)
    assert_close(dx, wanted, dtype, scale=4 * most)
    for got, total, like in zip(numbers, sums, (scale, bias), strict=True):
        assert got.dtype == like.dtype
        assert_close(got, total, like.dtype, scale=4 * math.sqrt(x.size / shape[-1]))
    if added:
        np.testing.assert_array_equal(dr, dx)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_extremes(implementation: str, name: str) -> None:
    """What is not finite stays in its row; large means lose nothing; rows of one number are 0."""
    ordinary = np.random.default_rng(0).normal(size=256)
    kinds: list[Any] = [ordinary, ordinary + 4096, np.full(256, 3.0), np.full(256, 1e-42)]
    for bad in (np.inf, np.nan, 1e30):
        kinds.append(np.where(np.arange(256) == 7, bad, ordinary))
    x, one = jnp.asarray(np.stack(kinds), jnp.float32), jnp.ones(256)
    call = call_of(name, implementation)
    y, (dx, *_) = with_gradients(implementation, call, x * 0 + 1, x, one, one, None)
    wanted, (d, *_) = with_gradients("xla", call_of(name, "xla"), x * 0 + 1, x, one, one, None)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(dx, d, rtol=1e-4, atol=1e-4)
    true = formula(name, x[:4], one, one, x[:4])[0]
    np.testing.assert_allclose(y[:4], true, rtol=1e-4, atol=1e-3)
    assert np.isnan(y[5]).all()


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [1, 8])
def test_one_launch_a_pass_on_h100(devices: int) -> None:
    x = jax.ShapeDtypeStruct((4096, 1600), jnp.bfloat16)
    number = jax.ShapeDtypeStruct((1600,), jnp.float32)

    def both(x: Any, r: Any, dy: Any, scale: Any, bias: Any) -> Any:
        y, vjp = jax.vjp(call_of("layer_norm", "mosaic_gpu"), x, scale, bias, r)
        z, pull = jax.vjp(call_of("rms_norm", "mosaic_gpu"), x, scale, bias, None)
        return y, vjp((dy, dy)), z, pull(dy)

    found = compiled_for_h100(both, x, x, x, number, number, devices=devices)
    assert kernels_in(found) == 4
    # Sums over rows of 264 blocks: nothing in float32 of the size of x.
    once = 4096 * 1600
    assert found.memory_analysis().temp_size_in_bytes < 4 * once


def test_bad_input() -> None:
    x, one = jnp.ones((2, 3)), jnp.ones(3)
    with pytest.raises(ValueError, match=r"layer_norm: bias has shape \(4,\), the width of x is 3"):
        layer_norm(x, one, jnp.ones(4))
    for function in (layer_norm, rms_norm):
        with pytest.raises(ValueError, match=r"scale has shape \(2, 3\), the width of x is 3"):
            function(x, x)
        with pytest.raises(TypeError, match="x has dtype int32; it must be of floats"):
            function(jnp.ones((2, 3), jnp.int32), one)
        with pytest.raises(TypeError, match="scale has dtype int32"):
            function(x, jnp.ones(3, jnp.int32))
        with pytest.raises(ValueError, match=r"x has shape \(0, 3\)"):
            function(jnp.ones((0, 3)), one)
        with pytest.raises(ValueError, match=r"x has shape \(\)"):
            function(jnp.ones(()), one)
        with pytest.raises(ValueError, match=r"residual has shape \(3,\), x has \(2, 3\)"):
            function(x, one, residual=one)
        with pytest.raises(TypeError, match="residual has dtype bfloat16, x has float32; cast"):
            function(x, one, residual=x.astype(jnp.bfloat16))
        for eps in (-1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match=r"eps is .*; it must be finite and not negative"):
                function(x, one, eps=eps)
        with pytest.raises(ValueError, match="unknown implementation 'triton'"):
            function(x, one, implementation="triton")
        with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
            function(x, one, implementation="mosaic_gpu")
