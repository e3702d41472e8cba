"""Attention against the formula in float64, and who computes it."""

import importlib
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec
from kernels.running import assert_close, random

import zerojax
from pallas_kernels import compat
from pallas_kernels.attention import attention, tokamax_gpu
from pallas_kernels.attention.seen import Seen
from zerojax.hlo.program import parse
from zerojax.hlo.work import work_of

needs_tokamax = pytest.mark.skipif(
    importlib.util.find_spec("tokamax") is None, reason="needs the extra `attention`"
)
OF_THEIRS = pytest.mark.filterwarnings("ignore:core.Jaxpr is missing a DebugInfo")

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


@pytest.mark.parametrize(
    ("kind", "platform", "dtype", "says", "wanted"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.bfloat16, None, "cudnn"),
        ("NVIDIA A100-SXM4-80GB", "gpu", jnp.float16, None, "cudnn"),
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.float32, None, "xla"),
        ("NVIDIA H100 80GB HBM3", "gpu", jnp.bfloat16, "head dim must be", "xla"),
        ("Tesla V100-SXM2-16GB", "gpu", jnp.float16, None, "xla"),
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


def hidden_by(window: int | None, ids: Any, causal: bool) -> np.ndarray:
    """Keys that the definition hides, [B, 1, T, T], position by position."""
    out = np.zeros((B, 1, T, T), bool)
    for b, i, j in np.ndindex(B, T, T):
        ahead = causal and j > i
        old = window is not None and j <= i - window
        run = ids is not None and len(set(np.asarray(ids)[b, min(i, j) : max(i, j) + 1])) > 1
        out[b, 0, i, j] = ahead or old or run
    return out


IDS = np.array([[3, 3, 1, 1, 1], [0, 0, 0, 5, 0]], np.int32)
SEEN = [(2, None, True), (None, IDS, True), (None, IDS, False), (3, IDS, True), (9, None, True)]


@pytest.mark.parametrize(("window", "ids", "causal"), SEEN)
def test_windows_and_packed_sequences(window: int | None, ids: Any, causal: bool) -> None:
    q, k, v = (random((B, T, h, D), jnp.float32, i) for i, h in enumerate((N, K, K)))
    keywords: dict[str, Any] = dict(sliding_window=window, segment_ids=ids, is_causal=causal)
    added = np.where(hidden_by(window, ids, causal), -1e30, 0)
    wanted = formula(q, k, v, added, D**-0.5)
    np.testing.assert_allclose(attention(q, k, v, **keywords), wanted, rtol=1e-4, atol=1e-5)


def test_dropout() -> None:
    q, k, v = arrays()
    ones = jnp.ones_like(v)
    key = jax.random.key(0)
    kept = attention(q, k, ones, dropout_rate=0.5, dropout_key=key)
    # The share of what is kept, over what is to be kept, is 1 on average.
    means = [
        float(attention(q, k, ones, dropout_rate=0.5, dropout_key=jax.random.key(i)).mean())
        for i in range(60)
    ]
    assert np.std(np.asarray(kept)) > 0.1
    np.testing.assert_allclose(np.mean(means), 1, atol=0.05)
    almost = attention(q, k, v, is_causal=True, dropout_rate=1e-9, dropout_key=key)
    np.testing.assert_allclose(almost, attention(q, k, v, is_causal=True), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"dropout_rate 0.5 needs a dropout_key"):
        attention(q, k, v, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"dropout_rate must be in \[0, 1\), not 1"):
        attention(q, k, v, dropout_rate=1, dropout_key=key)


def test_tokamax_is_asked_for_by_name() -> None:
    """What the error says, with tokamax or without."""
    given = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in arrays()]
    calls = {
        "takes bfloat16 and float16": ([x.update(dtype=jnp.float32) for x in given], {}),
        "has no dropout": (given, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}),
        "heads of 256 at the most": ([x.update(shape=(*x.shape[:3], 264)) for x in given], {}),
        "\\.\\[attention\\]|trace the function within jax.default_device": (given, {}),
    }
    with jax.sharding.use_abstract_mesh(hopper()):
        for says, (shapes, more) in calls.items():
            with pytest.raises(ValueError, match=f"implementation 'mosaic_gpu' .*{says}"):
                jax.eval_shape(
                    lambda *x, more=more: attention(*x, implementation="mosaic_gpu", **more),
                    *shapes,
                )
    with pytest.raises(ValueError, match=r"'mosaic_gpu' needs an NVIDIA GPU, Hopper .* on cpu"):
        attention(*arrays(), implementation="mosaic_gpu")


def hopper() -> AbstractMesh:
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    return AbstractMesh((1,), ("data",), abstract_device=device)


@needs_tokamax
@OF_THEIRS
@pytest.mark.parametrize(("window", "ids", "causal"), [(None, None, True), *SEEN[:4]])
def test_what_tokamax_is_given(monkeypatch: Any, window: Any, ids: Any, causal: bool) -> None:
    """Its plain implementation in the kernel's place, which no simulator runs: values and gradients
    are those of JAX's attention."""
    base = importlib.import_module("tokamax._src.ops.attention.base")
    plain = base.DotProductAttention(vjp=base.DotProductAttentionVjp())
    monkeypatch.setattr(compat, "tokamax_attention", lambda: plain)
    q, k, v = (random((B, T, h, D), jnp.float32, i) for i, h in enumerate((N, K, K)))
    mask = random((B, 1, T, T), jnp.float32, 4) > -1.5
    mask |= jnp.eye(T, dtype=bool)
    ids = None if ids is None else jnp.asarray(ids)
    seen = Seen(causal, window, ids, T, T)

    def theirs(*x: jax.Array) -> jax.Array:
        return tokamax_gpu.attention(*x, None, mask, seen, 0.3)

    def ours(*x: jax.Array) -> jax.Array:
        return attention(
            *x, mask=mask, is_causal=causal, sliding_window=window, segment_ids=ids, scale=0.3
        )

    g = random((B, T, N, D), seed=5)
    for got, want in zip(*(with_vjp(f, g, q, k, v) for f in (theirs, ours)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def with_vjp(f: Any, g: jax.Array, *x: jax.Array) -> list[jax.Array]:
    y, vjp = jax.vjp(f, *x)
    return [y, *vjp(g)]


@needs_tokamax
@OF_THEIRS
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
def test_tokamax_compiles_for_h100s() -> None:
    """Heads cut over a mesh axis, each device on its own rows, packed sequences in a window; what
    is kept for the backward pass is kept in a loop, and the kernel runs once all the same."""
    mesh = zerojax.topology("h100", devices=4, axes={"data": 2, "model": 2})
    zero = zerojax.zero(stage=0, mesh=mesh)
    length = 1024

    def local(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return attention(q, k, v, is_causal=True, sliding_window=256, segment_ids=ids)

    def layer(x: jax.Array, ids: jax.Array) -> jax.Array:
        return zero.per_device(local, sharded={"model": 2})(x, x[:, :, ::2], x[:, :, 1::2], ids) + x

    def loss(x: jax.Array, ids: jax.Array) -> jax.Array:
        kept = jax.checkpoint(layer, policy=zerojax.remat_policy("names:attention"))
        return jax.lax.scan(lambda x, _: (kept(x, ids), None), x, length=3)[0].sum(dtype="float32")

    cut = NamedSharding(mesh, PartitionSpec("data", None, "model"))
    x = jax.ShapeDtypeStruct((4, length, 8, 128), jnp.bfloat16, sharding=cut)
    rows = NamedSharding(mesh, PartitionSpec("data"))
    ids = jax.ShapeDtypeStruct((4, length), jnp.int32, sharding=rows)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(x, ids).compile()
    program = parse(compiled.as_text() or "")
    works = [
        work_of(program, computation, each)
        for computation in program.computations.values()
        for each in computation.instructions
        if each.opcode == "custom-call" and "mosaic_gpu" in each.attributes
    ]
    # Two products forward, three for dq, four for dk and dv; of a device 2 rows and 4 heads.
    product = 2 * 2 * 4 * length * 256 * 128
    assert sorted(sum(work.attention.values()) // product for work in works) == [2, 3, 4]
    assert sum(work.forward for work in works) == 2 * product
    scores = 2 * 4 * length * length * 2
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 3 * scores  # of three layers, none has its scores


def test_bad_input() -> None:
    q, k, v = arrays()
    with pytest.raises(
        ValueError, match="unknown implementation 'flash'; there are None, 'mosaic_gpu'"
    ):
        attention(q, k, v, implementation="flash")
    with pytest.raises(ValueError, match=r"'cudnn' needs an NVIDIA GPU.* runs on cpu"):
        attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="sliding_window only looks back; add is_causal"):
        attention(q, k, v, sliding_window=2)
    with pytest.raises(ValueError, match="sliding_window must be a positive int, not 0"):
        attention(q, k, v, sliding_window=0, is_causal=True)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 5\), and q .* k \(2, 7\)"):
        attention(q, k, v, segment_ids=IDS)
    with pytest.raises(TypeError, match="segment_ids has dtype float32, no ints"):
        attention(q, k, v, segment_ids=jnp.ones((B, T)))
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
