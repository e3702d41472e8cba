"""GELU of a sum and SwiGLU: every implementation against the formulas in float64."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.running import (
    DTYPES,
    IMPLEMENTATIONS,
    assert_close,
    calls_of,
    compiled_for_h100,
    random,
    with_gradients,
)

from pallas_kernels.activations import bias_gelu, mosaic_gpu, reference, swiglu
from pallas_kernels.activations.arguments import MEASURED, TESTED
from pallas_kernels.compat import kernels_in

pytestmark = pytest.mark.usefixtures("quick_compile")

erf = np.vectorize(math.erf)


def gelu(z: np.ndarray, approximate: bool) -> tuple[np.ndarray, np.ndarray]:
    """And its derivative, as they are written in books."""
    if approximate:
        c = math.sqrt(2 / math.pi)
        tanh = np.tanh(c * (z + 0.044715 * z**3))
        slope = (1 - tanh**2) * c * (1 + 3 * 0.044715 * z**2)
        return 0.5 * z * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * z * slope
    share = 0.5 * (1 + erf(z / math.sqrt(2)))
    return z * share, share + z * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("approximate", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"), [(s, DTYPES[i % 3]) for i, s in enumerate(TESTED)], ids=str
)
def test_bias_gelu(
    implementation: str,
    approximate: bool,
    shape: Any,
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mosaic_gpu, "BLOCKS", 4)  # so that few rows are many for a block
    x, dy = random(shape, dtype, 0), random(shape, dtype, 1)
    bias = random(shape[-1:], jnp.float32, 2)

    def call(x: Any, bias: Any) -> Any:
        return bias_gelu(x, bias, approximate=approximate, implementation=implementation)

    y, (dx, dbias) = with_gradients(implementation, call, dy, x, bias)
    assert (y.dtype, dx.dtype, dbias.dtype) == (dtype, dtype, jnp.float32)
    value, slope = gelu(np.float64(x) + np.float64(bias), approximate)
    wanted = np.float64(dy) * slope
    assert_close(y, value, dtype)
    assert_close(dx, wanted, dtype)
    total = wanted.reshape(-1, shape[-1]).sum(0)
    assert_close(dbias, total, jnp.float32, scale=math.sqrt(x.size / shape[-1]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bias_gelu_without_bias(implementation: str) -> None:
    x = random((5, 140), jnp.float32)

    def call(x: Any) -> Any:
        return bias_gelu(x, implementation=implementation)

    y, (dx,) = with_gradients(implementation, call, jnp.ones_like(x), x)
    value, slope = gelu(np.float64(x), True)
    assert_close(y, value, jnp.float32)
    assert_close(dx, slope, jnp.float32)
    assert_close(y, jax.nn.gelu(x), jnp.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dropout(implementation: str) -> None:
    """The same elements are dropped in both passes and by all implementations."""
    x, dy, key = random((64, 256), jnp.float32, 0), random((64, 256), jnp.float32, 1), 3

    def call(x: Any, bias: Any) -> Any:
        return bias_gelu(
            x,
            bias,
            dropout_rate=0.25,
            dropout_key=jax.random.key(key),
            implementation=implementation,
        )

    bias = random((256,), jnp.float32, 2)
    y, (dx, dbias) = with_gradients(implementation, call, dy, x, bias)
    kept = np.asarray(jax.random.bernoulli(jax.random.key(key), 0.75, x.shape))
    value, slope = gelu(np.float64(x) + np.float64(bias), True)
    assert_close(y, np.where(kept, value / 0.75, 0), jnp.float32)
    wanted = np.where(kept, dy * slope / 0.75, 0)
    assert_close(dx, wanted, jnp.float32)
    assert_close(dbias, wanted.sum(0), jnp.float32, scale=8)
    assert abs(kept.mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / kept.size)


def test_rate_0_needs_no_key_and_draws_nothing() -> None:
    x = random((2, 130))
    np.testing.assert_array_equal(bias_gelu(x, dropout_rate=0.0), bias_gelu(x))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "dtype"), [(s, DTYPES[i % 3]) for i, s in enumerate(TESTED)], ids=str
)
def test_swiglu(implementation: str, shape: Any, dtype: Any) -> None:
    gate, up, dy = (random(shape, dtype, seed) for seed in range(3))

    def call(gate: Any, up: Any) -> Any:
        return swiglu(gate, up, implementation=implementation)

    y, (dgate, dup) = with_gradients(implementation, call, dy, gate, up)
    assert (y.dtype, dgate.dtype, dup.dtype) == (dtype,) * 3
    g, u, d = (np.float64(x) for x in (gate, up, dy))
    share = 1 / (1 + np.exp(-g))
    assert_close(y, g * share * u, dtype)
    assert_close(dgate, d * u * share * (1 + g * (1 - share)), dtype)
    assert_close(dup, d * g * share, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("approximate", [True, False])
def test_extremes(implementation: str, approximate: bool) -> None:
    """What is large is 0 or itself, with the gradient 0 or 1, and what is not finite stays with
    its own element."""
    values = [1e38, -1e38, 1e20, -1e20, 1e-44, -1e-44, 0.0, np.inf, np.nan]
    x = jnp.asarray([values * 16], jnp.float32)
    ones = jnp.ones_like(x)

    def call(x: Any) -> Any:
        return bias_gelu(x, approximate=approximate, implementation=implementation)

    y, (dx,) = with_gradients(implementation, call, ones, x)
    wanted = [1e38, 0, 1e20, 0, 0, 0, 0, np.inf, np.nan]
    np.testing.assert_allclose(y[0], wanted * 16, rtol=1e-6, atol=1e-37)
    np.testing.assert_allclose(dx[0], [1, 0, 1, 0, 0.5, 0.5, 0.5, 1, np.nan] * 16, atol=1e-6)

    def gated(x: Any) -> Any:
        return swiglu(x, jnp.ones_like(x), implementation=implementation)

    y, (dx,) = with_gradients(implementation, gated, ones, x)
    np.testing.assert_allclose(y[0], wanted * 16, rtol=1e-6, atol=1e-37)
    finite = np.asarray([[1, 0, 1, 0, 0.5, 0.5, 0.5] * 16])
    np.testing.assert_allclose(dx.reshape(16, 9)[:, :7], finite.reshape(16, 7), atol=1e-6)


def test_under_vmap() -> None:
    x, bias = random((3, 4, 130)), random((3, 130))
    got = jax.vmap(bias_gelu)(x, bias)
    np.testing.assert_allclose(got[1], bias_gelu(x[1], bias[1]), 1e-6)
    grads = jax.vmap(jax.grad(lambda a, b: swiglu(a, b).sum()))(x, x)
    np.testing.assert_allclose(grads[0], jax.grad(lambda a: swiglu(a, x[0]).sum())(x[0]), 1e-6)


def test_under_shard_map() -> None:
    """The gradient of a bias that all devices share is summed over them."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    x, bias = random((16, 256)), random((256,))

    def slopes(x: Any, bias: Any) -> Any:
        return jax.grad(lambda *a: bias_gelu(*a).sum() + swiglu(a[0], a[0]).sum(), (0, 1))(x, bias)

    mapped = jax.shard_map(slopes, mesh=mesh, in_specs=(rows, whole), out_specs=(rows, whole))
    for got, wanted in zip(jax.jit(mapped)(x, bias), slopes(x, bias), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "width"), [("gelu", 384), ("swiglu", 512), ("swiglu_backward", 640)]
)
def test_a_second_call_traces_nothing(name: str, width: int) -> None:
    x = random((3, width))

    def both_ways() -> Any:
        function, *given = (bias_gelu, x, x[0]) if name == "gelu" else (swiglu, x, x)
        y, vjp = jax.vjp(functools.partial(function, implementation="mosaic_gpu"), *given)
        return vjp(y)

    first, second = calls_of(reference, name, both_ways)
    assert 0 < first == second


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [1, 8])
def test_one_launch_a_pass_on_h100(devices: int) -> None:
    x = jax.ShapeDtypeStruct((512, 6400), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((6400,), jnp.bfloat16)

    def both(x: Any, dy: Any, bias: Any, approximate: bool) -> Any:
        y, vjp = jax.vjp(
            lambda x, bias: bias_gelu(
                x,
                bias,
                approximate=approximate,
                dropout_rate=0.1,
                dropout_key=jax.random.key(0),
                implementation="mosaic_gpu",
            ),
            x,
            bias,
        )
        gate, pull = jax.vjp(lambda *x: swiglu(*x, implementation="mosaic_gpu"), x, dy)
        return y, vjp(dy), gate, pull(dy)

    call = functools.partial(both, approximate=devices == 1)
    assert kernels_in(compiled_for_h100(call, x, x, bias, devices=devices)) == 4


@pytest.mark.parametrize("function", ["bias_gelu", "swiglu"])
def test_only_the_arguments_are_kept(function: str) -> None:
    x, bias = random((8, 256), jnp.bfloat16), random((256,), jnp.bfloat16)

    def saved(call: Any, *arguments: Any) -> list[tuple[int, ...]]:
        _, vjp = jax.vjp(call, *arguments)
        return sorted(x.shape for x in jax.tree.leaves(vjp) if x.ndim > 0)

    if function == "swiglu":
        assert saved(swiglu, x, x) == [x.shape] * 2
    else:
        key = jax.random.key(0)
        kept = saved(lambda *a: bias_gelu(*a, dropout_rate=0.1, dropout_key=key), x, bias)
        assert sorted(kept) == [x.shape, bias.shape]


def test_what_is_measured_is_what_it_says() -> None:
    assert [m.bytes for m in MEASURED] == [
        2 * 2 * 4096 * 6400,
        5 * 2 * 4096 * 6400,
        3 * 2 * 4096 * 14336,
        8 * 2 * 4096 * 14336,
    ]
    for m in MEASURED:
        jax.eval_shape(m.call("xla"), *m.arguments)


def test_bad_input() -> None:
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"bias has shape \(4,\), the width of x is 3"):
        bias_gelu(x, jnp.ones(4))
    with pytest.raises(TypeError, match="x has dtype int32"):
        bias_gelu(jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match=r"x has shape \(0, 3\)"):
        bias_gelu(jnp.ones((0, 3)))
    with pytest.raises(ValueError, match=r"dropout_rate is 1.0; it must be at least 0 and below 1"):
        bias_gelu(x, dropout_rate=1.0)
    with pytest.raises(ValueError, match="pass a dropout_key"):
        bias_gelu(x, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"gate has shape \(2, 3\), up \(3, 2\)"):
        swiglu(x, x.T)
    with pytest.raises(ValueError, match="not empty"):
        swiglu(jnp.ones((0,)), jnp.ones((0,)))
    with pytest.raises(TypeError, match="gate has dtype float32, up bfloat16; cast one of them"):
        swiglu(x, x.astype(jnp.bfloat16))
    for function in (bias_gelu, lambda x, **k: swiglu(x, x, **k)):
        with pytest.raises(ValueError, match="unknown implementation 'triton'"):
            function(x, implementation="triton")
        with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
            function(x, implementation="mosaic_gpu")
