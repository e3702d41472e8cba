"""Attention against the formula in float64, and who computes it."""

import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from kernels.running import assert_close, random

from pallas_kernels.attention import attention

pytestmark = pytest.mark.usefixtures("quick_compile")

B, T, S, N, K, D = 2, 5, 7, 4, 2, 8


def arrays(dtype: Any = jnp.float32) -> list[jax.Array]:
    return [random((B, n, h, D), dtype, i) for i, (n, h) in enumerate([(T, N), (S, K), (S, K)])]


def formula(q: Any, k: Any, v: Any, added: Any, scale: float) -> np.ndarray:
    q, k, v, added = (np.asarray(x, np.float64) for x in (q, k, v, added))
    k, v = (np.repeat(x, N // K, axis=2) for x in (k, v))
    logits = np.einsum("btnd,bsnd->bnts", q, k) * scale + added
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bnts,bsnd->btnd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("dtype", "shape", "causal", "scale"),
    [
        (jnp.float32, (B, N, T, S), False, None),
        (jnp.float32, (1, 1, T, S), True, 0.5),
        (jnp.bfloat16, (B, 1, 1, S), True, None),
        (jnp.float32, (S,), False, 2.0),
        # JAX's has no float16 on the CPU.
    ],
)
def test_formula(dtype: Any, shape: tuple[int, ...], causal: bool, scale: float | None) -> None:
    bias, mask = random(shape, dtype, 7), random(shape, jnp.float32, 9) > -1
    mask = mask.at[..., 0].set(True)
    q, k, v = arrays(dtype)
    got = jax.jit(lambda *x: attention(*x, bias=bias, mask=mask, is_causal=causal, scale=scale))(
        q, k, v
    )
    assert got.dtype == dtype
    hidden = ~np.asarray(mask) | (causal & (np.arange(S) > np.arange(T)[:, None]))
    added = np.where(hidden, -1e30, np.asarray(bias, np.float64))
    assert_close(got, formula(q, k, v, added, scale or D**-0.5), dtype, scale=2)


def test_gradients() -> None:
    given, g = arrays(), random((B, T, N, D), seed=5)
    _, vjp = jax.vjp(lambda *x: attention(*x, is_causal=True), *given)
    hidden = np.where(np.arange(S) > np.arange(T)[:, None], -1e30, 0)
    for i, got in enumerate(vjp(g)):
        # Along one random line: the difference of the formula's values.
        line = np.asarray(random(given[i].shape, seed=8 + i), np.float64)
        ends = []
        for sign in (1, -1):
            moved = [np.asarray(x, np.float64) for x in given]
            moved[i] = moved[i] + sign * 1e-6 * line
            ends.append(np.sum(formula(*moved, hidden, D**-0.5) * np.asarray(g, np.float64)))
        wanted = (ends[0] - ends[1]) / 2e-6
        np.testing.assert_allclose(np.sum(np.asarray(got) * line), wanted, rtol=1e-4, atol=1e-4)


def test_in_shard_map_and_vmap() -> None:
    q, k, v = arrays()
    wanted = attention(q, k, v)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=spec, out_specs=spec))(q, k, v)
    np.testing.assert_allclose(mapped, wanted, rtol=1e-5, atol=1e-6)
    each = jax.vmap(lambda *x: attention(*(y[None] for y in x))[0])(q, k, v)
    np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "platform", "dtype", "says", "wanted"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.bfloat16, None, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", "gpu", jnp.float16, None, "cudnn"),
        ("NVIDIA GeForce RTX 3090", "gpu", jnp.bfloat16, None, "cudnn"),
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.float32, None, "xla"),
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.bfloat16, "head dim must be", "xla"),
        ("Tesla V100-SXM2-16GB", "gpu", jnp.float16, None, "xla"),
        ("NVIDIA GeForce RTX 2080 Ti", "gpu", jnp.float16, None, "xla"),
        ("NVIDIA T4", "gpu", jnp.float16, None, "xla"),
        ("AMD Instinct MI300X", "gpu", jnp.bfloat16, None, "xla"),
        ("TPU v5", "tpu", jnp.bfloat16, None, "xla"),
    ],
)
def test_what_is_taken(
    monkeypatch: Any, kind: str, platform: str, dtype: Any, says: str | None, wanted: str
) -> None:
    calls: list[str] = []
    given = [jax.ShapeDtypeStruct(x.shape, dtype) for x in arrays()]

    def recorded(q: Any, k: Any, v: Any, bias: Any, mask: Any, **keywords: Any) -> Any:
        implementation = keywords["implementation"]
        if implementation == "cudnn" and says:
            raise NotImplementedError(says)
        if implementation == "cudnn":
            assert bias.shape == (1, 1, T, S)
            assert bias.dtype == dtype
        calls.append(implementation)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        jax.eval_shape(lambda *x: attention(*x, bias=jnp.ones(S)), *given)
        assert calls[-1] == wanted
        if wanted == "xla":
            reason = says or "'cudnn' (needs an NVIDIA GPU, Ampere|takes bfloat16 and float16)"
            with pytest.raises(ValueError, match=reason):
                jax.eval_shape(lambda *x: attention(*x, implementation="cudnn"), *given)


def test_tokamax(monkeypatch: Any) -> None:
    if sys.version_info < (3, 12):
        with pytest.raises(ImportError, match="pip install tokamax"):
            attention(*arrays(), implementation="tokamax")
    theirs = types.SimpleNamespace(dot_product_attention=jax.nn.dot_product_attention)
    monkeypatch.setitem(sys.modules, "tokamax", theirs)
    got = attention(*arrays(), is_causal=True, implementation="tokamax")
    np.testing.assert_allclose(got, attention(*arrays(), is_causal=True), rtol=1e-5)


def test_bad_input() -> None:
    q, k, v = arrays()
    with pytest.raises(ValueError, match="unknown implementation 'flash'; there are None, 'cudnn'"):
        attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match=r"'cudnn' needs an NVIDIA GPU.* runs on cpu"):
        attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match=r"q has shape \(5, 4, 8\), not \[batch, length"):
        attention(q[0], k, v)
    with pytest.raises(ValueError, match="k and v have to be alike"):
        attention(q, k, v[:, :3])
    with pytest.raises(ValueError, match="q has 3 heads, no multiple of the 2"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match=r"k has shape \(2, 0, 2, 8\)"):
        attention(q, k[:, :0], v[:, :0])
    with pytest.raises(TypeError, match="q is float32 and v bfloat16"):
        attention(q, k, v.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="q has dtype int32"):
        attention(q.astype(jnp.int32), k, v)
    with pytest.raises(TypeError, match="mask has dtype float32; a mask is of bool"):
        attention(q, k, v, mask=jnp.ones((T, S)))
    with pytest.raises(ValueError, match=r"bias has shape \(7, 5\), which does not broadcast"):
        attention(q, k, v, bias=jnp.ones((S, T)))
