"""Cross-entropy in chunks: every implementation against the formula in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from kernels.running import (
    IMPLEMENTATIONS,
    assert_close,
    compiled_for_h100,
    random,
    run,
)

from pallas_kernels.compat import kernels_in
from pallas_kernels.cross_entropy import (
    chunks,
    mosaic_gpu,
    reference,
    softmax_cross_entropy,
)
from pallas_kernels.cross_entropy.arguments import MEASURED, TESTED, both_ways

pytestmark = pytest.mark.usefixtures("quick_compile")

PLAIN: dict[str, Any] = {"label_smoothing": 0.0, "z_loss": 0.0}
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.02}


def arrays(tokens: int, width: int, vocabulary: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """hidden, weight, bias, labels and cotangents."""
    labels = np.random.default_rng(3).integers(0, vocabulary, tokens)
    labels[-1] = vocabulary - 1
    if tokens > 2:
        labels[1] = -100
    return [
        random((tokens, width), dtype, 1),
        random((vocabulary, width), dtype, 2),
        random((vocabulary,), jnp.float32, 4),
        jnp.asarray(labels),
        random((tokens,), jnp.float32, 5),
    ]


def formula(h: Any, w: Any, b: Any, y: Any, g: Any, settings: Any) -> list[np.ndarray]:
    """Losses, and gradients of hidden, weight and bias."""
    h, w, b, g = (np.asarray(x, np.float64) for x in (h, w, b, g))
    smooth, zeta = settings["label_smoothing"], settings["z_loss"]
    y, v = np.asarray(y), len(w)
    good = y != -100
    hot = np.eye(v)[np.where(good, y, 0)]
    z = h @ w.T + b
    top = z.max(1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(1, keepdims=True)))[:, 0]
    target = (1 - smooth) * hot + smooth / v
    losses = np.where(good, lse - (target * z).sum(1) + zeta * lse**2, 0)
    d = np.exp(z - lse[:, None]) * (1 + 2 * zeta * lse)[:, None] - target
    d *= np.where(good, g, 0)[:, None]
    return [losses, d @ w, d.T @ h, d.sum(0)]


def with_gradients(function: Any, y: Any, g: Any, *arrays: Any) -> Any:
    found, transposed = jax.vjp(lambda h, w, b: function(h, w, y, bias=b), *arrays)
    return (found, *transposed(g))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "dtype", "settings", "last", "chunk"),
    [
        (TESTED[0], jnp.float32, ALL, False, 2),
        (TESTED[0], jnp.bfloat16, PLAIN, True, 3),
        (TESTED[1], jnp.float32, PLAIN, True, 2),
        (TESTED[1], jnp.float16, ALL, False, None),
        (TESTED[2], jnp.bfloat16, ALL, False, 1),
        (TESTED[3], jnp.float32, ALL, True, 4),
    ],
)
def test_formula(
    implementation: str, shape: Any, dtype: Any, settings: Any, last: bool, chunk: int | None
) -> None:
    h, w, b, y, g = arrays(*shape, dtype)

    def losses(h: Any, w: Any, y: Any, bias: Any) -> jax.Array:
        return softmax_cross_entropy(
            h,
            w.T if last else w,
            y,
            bias=bias,
            weight_layout="vocabulary_last" if last else "vocabulary_first",
            chunk_tokens=chunk,
            implementation=implementation,
            **settings,
        )

    got = run(implementation, partial(with_gradients, losses), y, g, h, w, b)
    assert [x.dtype for x in got] == [jnp.float32, dtype, dtype, jnp.float32]
    for i, (x, wanted) in enumerate(zip(got, formula(h, w, b, y, g, settings), strict=True)):
        # The losses are exact; gradients go through logits' gradients in the arrays' dtype.
        assert_close(x, wanted, dtype if i else jnp.float32, scale=4 if i else 16)


def whole(h: Any, w: Any, y: Any, bias: Any = 0.0) -> jax.Array:
    """The definition, with all logits at once."""
    logits = h @ w.T + bias
    picked = jnp.take_along_axis(logits, jnp.where(y == -100, 0, y)[:, None], axis=1)[:, 0]
    return jnp.where(y == -100, 0, jax.nn.logsumexp(logits, axis=1) - picked)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extremes(implementation: str) -> None:
    """Huge logits, words that are ruled out, and what is not finite, as the definition has it."""
    v = 1163
    logits = np.random.default_rng(0).normal(size=(7, v))
    logits[0, [5, 9]] = [1e4, -1e4]
    logits[1] -= 1e4
    logits[2, 7] = np.nan
    logits[3, 800:] = np.inf
    logits[4, 1:] = -np.inf
    logits[5, 500] = np.inf
    logits[6] = 1e-42
    z, y = jnp.asarray(logits, jnp.float32), jnp.asarray([5, 3, 3, 7, 0, 2, v - 1])
    g = jnp.arange(1.0, 8)

    def by_definition(z: Any, y: Any, g: Any) -> Any:
        """Of hidden states that are 0, so that the bias is the logits."""
        nothing = jnp.zeros((1, 1)), jnp.zeros((v, 1))
        loss, transposed = jax.vjp(lambda z: whole(*nothing, y[None], bias=z)[0], z)
        return loss, *transposed(g)

    def by_rows(z: Any) -> Any:
        which = mosaic_gpu if implementation == "mosaic_gpu" else reference
        filled = jnp.pad(z, ((0, 0), (0, 5)))
        found = which.statistics(filled, y, v, False)
        factors = reference.Factors(g, g, jnp.zeros(7))
        d = which.gradient(filled, y, v, found.lse, factors, z.dtype)
        return found.lse - found.picked, d[:, :v], d[:, v:]

    wanted = jax.jit(jax.vmap(by_definition))(z, y, g)
    *got, beyond = run(implementation, by_rows, z)
    np.testing.assert_array_equal(beyond, np.zeros((7, 5)))
    for x, found in zip(got, wanted, strict=True):
        # What is kept of a row of 1e4s is as coarse as they are.
        coarse = np.where(np.arange(7) == 1, 1e-3, 1e-6).reshape(-1, *[1] * (x.ndim - 1))
        unlike = ~(np.abs(x - found) <= coarse * (1 + np.abs(found)))
        unlike &= ~(np.isnan(x) & np.isnan(found)) & (x != found)
        assert not unlike.any(), np.argwhere(unlike)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_labels_that_are_ignored_or_wrong(implementation: str) -> None:
    """Ignored tokens are 0 whatever their logits; a wrong label spoils its token and the weight's
    gradient, so that it is seen."""
    h, w, b, _, g = arrays(*TESTED[0])

    def call(h: Any, y: Any, ignore: int) -> Any:
        losses = partial(softmax_cross_entropy, ignore_index=ignore, implementation=implementation)
        return with_gradients(losses, y, g, h, w, b.at[3].set(-jnp.inf))

    def both(h: Any) -> Any:
        ignored = call(h * 1e30, jnp.full(5, 7), 7)
        return ignored, call(h, jnp.asarray([0, 301, -1, -100, 2]), -100)

    ignored, wrong = run(implementation, both, h)
    for x in ignored:
        np.testing.assert_array_equal(x, np.zeros_like(x))
    losses, d_hidden, d_weight, _ = wrong
    np.testing.assert_array_equal(np.isnan(losses), [False, True, True, False, False])
    np.testing.assert_array_equal(np.isnan(d_hidden).all(1), [False, True, True, False, False])
    assert losses[3] == 0
    assert np.isnan(d_weight).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma: bool) -> None:
    h, w, _, y, _ = arrays(8, 8, 150)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    over, same = PartitionSpec("data"), PartitionSpec()

    def gradients(h: Any, w: Any, y: Any) -> Any:
        found = jax.grad(lambda *x: softmax_cross_entropy(*x, y).sum(), (0, 1))(h, w)
        return found if check_vma else (found[0], jax.lax.psum(found[1], "data"))

    mapped = jax.shard_map(
        gradients, mesh=mesh, in_specs=(over, same, over), out_specs=(over, same),
        check_vma=check_vma,
    )  # fmt: skip
    wanted = jax.grad(lambda h, w: whole(h, w, y).sum(), (0, 1))(h, w)
    for x, z in zip(jax.jit(mapped)(h, w, y), wanted, strict=True):
        np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-6)


@pytest.mark.one_in(2)
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [1, 8])
def test_two_kernels(devices: int) -> None:
    """One forward, one backward; XLA would run some twice to write a part of their results."""
    given = [
        jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for x in arrays(512, 128, 1003, jnp.bfloat16)
    ]

    def call(h: Any, w: Any, b: Any, y: Any, g: Any) -> Any:
        losses = partial(softmax_cross_entropy, implementation="mosaic_gpu", **ALL)
        found = with_gradients(losses, y[0], g[0], h[0], w[0], b[0])
        return [x[None] for x in found]

    assert kernels_in(compiled_for_h100(call, *given, devices=devices)) == 2


@pytest.mark.one_in(2)
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_memory_of_a_large_vocabulary(implementation: str) -> None:
    """The weight's gradient in float32, one chunk's logits and their gradient: 2.6 GB, as a result
    that comes last lends its place to the logits. Whole logits alone would be 16.8 GB."""
    found = compiled_for_h100(both_ways(implementation), *MEASURED[0].arguments, devices=1)
    memory = found.memory_analysis()
    weight, chunk = 128256 * 4096, 128256 * chunks.chunk_of(32768, 4096, 128256)
    assert memory.temp_size_in_bytes < 4 * weight + (4 + 2) * chunk + 2**26
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 5e9


def test_bad_input() -> None:
    h, w, b, y, _ = arrays(4, 8, 20)
    with pytest.raises(ValueError, match=r"hidden has shape \(4, 8\) and labels \(3,\)"):
        softmax_cross_entropy(h, w, y[:3])
    with pytest.raises(ValueError, match=r"not \[v, d\] with d = 8. Pass .*'vocabulary_last'"):
        softmax_cross_entropy(h, w.T, y)
    with pytest.raises(ValueError, match=r"not \[d, v\] with d = 8. Pass .*'vocabulary_first'"):
        softmax_cross_entropy(h, w, y, weight_layout="vocabulary_last")
    with pytest.raises(ValueError, match=r"which is not \[v, d\] with d = 8$"):
        softmax_cross_entropy(h, w[:, :5], y)
    with pytest.raises(ValueError, match="unknown weight_layout 'dv'; there are 'vocabulary_fir"):
        softmax_cross_entropy(h, w, y, weight_layout="dv")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bias has shape \(8,\), not \[v\] with v = 20"):
        softmax_cross_entropy(h, w, y, bias=b[:8])
    with pytest.raises(TypeError, match="labels has dtype float32; classes are integers"):
        softmax_cross_entropy(h, w, y.astype(jnp.float32))
    with pytest.raises(TypeError, match="hidden has dtype int32, no floats"):
        softmax_cross_entropy(h.astype(jnp.int32), w, y)
    with pytest.raises(TypeError, match="hidden is bfloat16 and weight float32; cast"):
        softmax_cross_entropy(h.astype(jnp.bfloat16), w, y)
    with pytest.raises(ValueError, match="nothing is in them"):
        softmax_cross_entropy(h[:0], w, y[:0])
    for keywords in ({"label_smoothing": 1.5}, {"z_loss": -1.0}, {"chunk_tokens": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(keywords))} is"):
            softmax_cross_entropy(h, w, y, **keywords)
    with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
        softmax_cross_entropy(h, w, y, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'triton'"):
        softmax_cross_entropy(h, w, y, implementation="triton")
