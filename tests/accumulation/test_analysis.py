"""What a value has to do with the rows of the batch."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import zerojax
from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.flat import flatten
from zerojax.accumulation.kinds import FIXED, RowKind
from zerojax.accumulation.resolve import analyse
from zerojax.accumulation.symbolic import TracedRows, UnevenError
from zerojax.accumulation.traces import symbolic_program

B, K = 24, 3
W = np.ones((4, 5), np.float32)


def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((rows, 4), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows,), jnp.int32),
        "t": jax.ShapeDtypeStruct((rows, 6, 4), jnp.float32),
    }


def analysis(function: Callable[..., Any], rest: tuple[int, ...] = ()) -> tuple[Analysis, Any]:
    """Of ``function(w, batch)``, whose results are all part of the state."""
    one, two = (
        flatten(jax.make_jaxpr(function)(W, batch(rows)), [0], [1, 2, 3]) for rows in (B, B // K)
    )
    given = [FIXED.but(learned=True), *[RowKind("rows", dim=0, outer=1)] * 3]
    symbolic = symbolic_program(one, two, TracedRows(B, B // K))
    found, _ = analyse(symbolic, given, B // K, rest)
    return found, [found.kind(v) for v in symbolic.flat.outvars]


def convolved(kernel: jax.Array, row: jax.Array) -> jax.Array:
    return (lax.conv(row[None], kernel, (1,), "SAME") ** 2).sum()


def layout(kind: RowKind) -> tuple[int, int | None]:
    return kind.dim, kind.outer


@pytest.mark.parametrize(
    ("function", "dim", "outer"),
    [
        (lambda w, b: b["x"] @ w, 0, 1),
        (lambda w, b: (b["x"] @ w).T, 1, 1),
        (lambda w, b: b["t"].reshape(-1, 4), 0, 1),
        (lambda w, b: b["x"].reshape(-1, 2, 4).max(1), 0, 1),  # neighbours
        (lambda w, b: lax.map(jnp.sin, jnp.concatenate([b["x"], b["x"]])), 0, 2),
        (lambda w, b: jnp.swapaxes(b["t"], 0, 1).reshape(-1, 4), 0, 6),
        (lambda w, b: lax.reshape(b["t"], (b["t"].size,), (1, 0, 2)), 0, 6),
        (lambda w, b: jax.vmap(jax.grad(convolved), (None, 0))(jnp.ones((2, 6, 2)), b["t"]), 0, 1),
        (lambda w, b: jnp.concatenate([b["x"], 2 * b["x"]]), 0, 2),
        (lambda w, b: jnp.concatenate([b["x"], 2 * b["x"]])[: b["x"].shape[0]], 0, 1),
        (lambda w, b: jnp.stack([b["x"], b["x"]]), 1, 1),
        (lambda w, b: jnp.take(w, b["y"], axis=0), 0, 1),
        (lambda w, b: b["x"][jnp.arange(b["x"].shape[0]), b["y"]], 0, 1),
        (lambda w, b: b["x"][np.arange(b["x"].shape[0]), b["y"]], 0, 1),
        (lambda w, b: b["x"] * np.full((len(b["x"]), 4), 2, np.float32), 0, 1),
        (lambda w, b: b["x"].at[jnp.arange(b["x"].shape[0]), b["y"]].add(1.0), 0, 1),
        (lambda w, b: jnp.sort(b["x"], axis=1), 0, 1),
        (lambda w, b: jnp.cumsum(b["t"], axis=1), 0, 1),
        (lambda w, b: lax.scan(lambda c, x: (c + x, c), b["x"], b["t"].swapaxes(0, 1))[1], 1, 1),
        (lambda w, b: lax.map(lambda x: x @ w, b["x"]), 0, 1),
        (lambda w, b: lax.cond(w[0, 0] > 0, lambda: b["x"], lambda: 2 * b["x"]), 0, 1),
        (lambda w, b: jax.checkpoint(lambda w: b["x"] @ w)(w), 0, 1),
        (lambda w, b: jnp.zeros_like(b["x"]), 0, None),
        (lambda w, b: lax.conv(b["t"], jnp.ones((2, 6, 2)), (1,), "SAME"), 0, 1),
    ],
)  # fmt: skip
def test_rows_stay_apart(function: Callable[..., Any], dim: int, outer: int | None) -> None:
    _, (kind,) = analysis(function)
    assert (kind.name, *layout(kind)) == ("rows", dim, outer), kind


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda w, b: (b["x"] @ w).sum(), "sum"),
        (lambda w, b: 2 * (b["x"] @ w).mean(0).reshape(5, 1).T, "sum"),
        (lambda w, b: b["x"].T @ (b["x"] @ w), "sum"),
        (lambda w, b: jax.grad(lambda w: ((b["x"] @ w) ** 2).mean())(w), "sum"),
        (lambda w, b: jax.grad(lambda w: jnp.take(w, b["y"], axis=0).sum())(w), "sum"),
        (lambda w, b: jnp.zeros(4, jnp.int32).at[b["y"]].add(1), "sum"),
        (lambda w, b: lax.map(lambda x: (x @ w).sum(), b["x"]).sum(), "sum"),
        (lambda w, b: jax.grad(lambda w: lax.map(lambda x: (x @ w).sum(), b["x"]).sum())(w), "sum"),
        (lambda w, b: b["x"].max(), "max"),
        (lambda w, b: b["x"].prod(0), "prod"),
        (lambda w, b: (b["x"].prod(0) * b["t"].prod((0, 1))).prod(), "prod"),
        (lambda w, b: 2 * b["x"].prod(0), "global"),
        (lambda w, b: (b["x"] > 0).any(), "or"),
        (lambda w, b: (b["x"] > 0).all(), "and"),
        (lambda w, b: jnp.zeros(4).at[jnp.arange(len(b["x"])) % 4].add(b["x"][:, 0]), "mixed"),
        # In row 0 of the batch, and not of each micro-batch, as many numbers as there are rows.
        (lambda w, b: (b["x"] @ jnp.ones((4, 32))).at[:1, : len(b["x"])].set(1).sum(), "mixed"),
        (lambda w, b: jnp.exp((b["x"] @ w).mean()), "global"),
        (lambda w, b: (b["x"] @ w).mean() ** 2, "global"),
        (lambda w, b: b["x"].sum() * (b["x"] @ w).sum(), "global"),
        (lambda w, b: jnp.where((b["x"] @ w).mean() > 0, w, 2 * w), "global"),
        (lambda w, b: w.astype(int)[0].at[b["y"]].add(1), "global"),
        (lambda w, b: 3 * w, "fixed"),
        (lambda w, b: lax.fori_loop(0, len(b["x"]), lambda i, c: 2 * c, w), "fixed"),
        (lambda w, b: b["x"].shape[0] * w, "fixed"),
    ],
)  # fmt: skip
def test_numbers_of_all_rows(function: Callable[..., Any], name: str) -> None:
    _, (kind,) = analysis(function)
    assert kind.name == name, kind


@pytest.mark.parametrize(
    ("loss", "why", "primitive"),
    [
        (lambda w, b: (b["x"] @ w @ w.T @ b["x"].T).var(), "combines", "broadcast"),
        (lambda w, b: (b["x"] @ w)[::-1].sum(), "combines", "rev"),
        (
            lambda w, b: ((b["x"] @ w)[(jnp.arange(len(b["x"])) + 1) % len(b["x"])] ** 2).sum(),
            "combines", "gather",
        ),
        (
            lambda w, b: (b["x"] @ w)[b["y"], jnp.arange(len(b["x"])) % 5].sum(),
            "combines", "scatter",
        ),
        (
            lambda w, b: (b["x"] @ w)[jnp.arange(len(b["x"]))[: len(b["x"]) // 2]].sum(),
            "combines", "slice",
        ),
        (
            lambda w, b: lax.map(
                lambda xi: (xi[0] @ w).sum() * xi[1], (b["x"], jnp.arange(len(b["x"])))
            ).sum(),
            "combines", "scan",
        ),
        (lambda w, b: (b["x"] @ w).sum() * jnp.ones(len(b["x"]) ** 2).sum(), "combines", "broad"),
        (lambda w, b: jnp.sort(b["x"] @ w, axis=0)[:, 0].sum(), "combines", "sort"),
        (lambda w, b: ((b["x"] @ w).sum(1) * jnp.arange(len(b["x"]))).sum(), "row numbers", "iota"),
        (lambda w, b: jnp.sqrt((b["x"] @ w).mean()), "uses a number computed from", "broadcast"),
        (lambda w, b: (b["x"] @ w - (b["x"] @ w).mean(0)).var(), "uses a number", "sub"),
        (lambda w, b: (b["x"] @ w).reshape(4, -1).max(1).sum(), "combines", "reshape"),
        (
            lambda w, b: lax.scan(lambda c, x: (c * (x @ w).sum(), None), 1.0, b["x"])[0],
            "loops over the rows", "scan",
        ),
    ],
)  # fmt: skip
def test_losses_in_which_rows_meet(loss: Any, why: str, primitive: str) -> None:
    _, (kind,) = analysis(lambda w, b: jax.grad(loss)(w, b))
    assert kind.name == "mixed"
    assert kind.problem is not None
    assert why in kind.problem.why
    assert kind.problem.where.startswith(primitive), kind.problem
    assert "test_analysis.py:" in kind.problem.where


def test_sums_of_the_batch_alone_come_first() -> None:
    def loss(w: jax.Array, b: Any) -> jax.Array:
        mask = b["y"] > 0
        x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
        return ((x @ w).sum(1) * mask).sum() / mask.sum() + zerojax.weighted_mean(x @ w[:, 0], mask)

    for each in (loss, jax.checkpoint(loss, static_argnums=())):
        _, (kind,) = analysis(lambda w, b, each=each: jax.grad(each)(w, b))
        assert kind.name == "sum", kind


def test_statistics_that_are_kept_are_a_micro_batchs_own() -> None:
    def step(w: jax.Array, b: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            x = b["x"] @ w
            mean = x.mean(0)
            square = (x * x).mean(0)
            return ((x - mean) / (square - mean**2)).mean(), (mean, square)

        (value, (mean, square)), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grads, 0.9 * w[0] + 0.1 * mean + square, value

    found, (params, running, loss) = analysis(step, rest=(1,))
    assert (params.name, running.name, loss.name) == ("global", "own", "sum")
    assert any("test_analysis.py" in place for place in found.owners)
    _, (params, *_) = analysis(step)  # nothing is kept
    assert params.name == "mixed"


def by_custom_vjp(rule: Any) -> Any:
    """The identity, whose cotangents go through ``rule``."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    identity.defvjp(lambda x: (x, None), lambda _, g: (rule(g),))
    return identity


def centred(g: jax.Array) -> jax.Array:
    return g - g.mean(0)


def normalized(g: jax.Array) -> jax.Array:
    return g / jnp.linalg.norm(g)


def clipped(g: jax.Array) -> jax.Array:
    return g * jnp.minimum(1, 1 / jnp.linalg.norm(g))


def clipped_by_row(g: jax.Array) -> jax.Array:
    return g * jnp.minimum(1, 1 / jnp.linalg.norm(g, axis=1, keepdims=True))


def of_the_batchs_size(g: jax.Array) -> jax.Array:
    return g * len(g)


HOW = [by_custom_vjp, lambda rule: jax.checkpoint(by_custom_vjp(rule))]


@pytest.mark.parametrize("rule", [centred, normalized, clipped])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("statistics", [False, True])
def test_backward_functions_in_which_rows_meet(how: Any, rule: Any, statistics: bool) -> None:
    """Also beside batch statistics, whose own backward pass is a micro-batch's own, and where a
    function of jax that is traced once takes both."""

    def step(w: jax.Array, b: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            x = b["x"] @ w
            mean, norm = x.mean(0), jnp.linalg.norm(x)
            x = how(rule)((x - mean) / norm if statistics else x)
            return (x**2).mean(), mean + norm

        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grads, kept, value

    _, (params, kept, value) = analysis(step, rest=(1,) if statistics else ())
    assert (params.name, kept.name) == ("mixed", "own" if statistics else "global")
    assert value.name == "sum"
    assert params.problem is not None
    assert "a number computed from all rows" in params.problem.why
    assert "test_analysis.py:" in params.problem.where


@pytest.mark.parametrize("rule", [clipped_by_row, of_the_batchs_size])
@pytest.mark.parametrize("how", HOW)
def test_backward_functions_of_rows_by_themselves(how: Any, rule: Any) -> None:
    _, (kind,) = analysis(lambda w, b: jax.grad(lambda w: (how(rule)(b["x"] @ w) ** 2).sum())(w))
    assert kind.name == "sum"


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit, lambda layer: layer])
@pytest.mark.parametrize("scanned", [False, True])
def test_the_backward_pass_of_statistics_that_are_kept(around: Any, scanned: bool) -> None:
    """However often jax traces a layer again, for a checkpoint, a jit or a loop."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        x = x @ w @ w.T
        mean = jnp.mean(x, 0)
        x = x - mean
        cov = x.T @ x / len(x)
        return jax.nn.gelu(x) @ cov, (mean, cov)

    def step(w: jax.Array, b: Any) -> Any:
        def loss(w: jax.Array) -> Any:
            if scanned:
                x, kept = lax.scan(around(layer), b["x"], jnp.stack([w, 2 * w]))
            else:
                x, one = around(layer)(b["x"], w)
                x, other = around(layer)(x, 2 * w)
                kept = jax.tree.map(lambda *x: jnp.stack(x), one, other)
            return (x**2).mean(), kept

        (value, kept), grads = jax.value_and_grad(loss, has_aux=True)(w)
        return w - grads, *kept, value

    _, kinds = analysis(step, rest=(1, 2))
    assert [k.name for k in kinds] == ["global", "own", "own", "sum"], kinds


def test_noise_in_the_batchs_shape() -> None:
    key = jax.random.key(0)
    found, (kind,) = analysis(lambda w, b: b["x"] + jax.random.normal(key, b["x"].shape))
    assert kind.rows
    assert found.drawn
    found, (kind,) = analysis(lambda w, b: w + jax.random.normal(key, w.shape))
    assert kind.name == "fixed"
    assert not found.drawn


@pytest.mark.parametrize(
    ("function", "contrast"),
    [
        (
            lambda w, b: jnp.sin(b["x"]) if b["x"].shape[0] > 10 else jnp.cos(b["x"]),
            r" with 24 rows, and cos at test_analysis\.py:\d+ with 8",
        ),
        (
            lambda w, b: b["x"] ** (len(b["x"]) + 2),
            ", whose y is 26 with 24 rows, and 10 with 8",
        ),
        (
            lambda w, b: b["x"][:, len(b["x"]) // B :][:, :3],
            r", whose start_indices is \(0, 1\) with 24 rows, and \(0, 0\) with 8",
        ),
        (lambda w, b: jnp.sin(b["x"] if len(b["x"]) == B else 2 * b["x"]) + 2 * b["x"], None),
        (lambda w, b: (jnp.sin(b["x"]), jnp.cos(b["x"]))[len(b["x"]) // B], ""),
    ],
)
def test_programs_that_depend_on_the_number_of_rows(function: Any, contrast: str | None) -> None:
    with pytest.raises(UnevenError, match=r"test_analysis\.py|other values") as raised:
        analysis(function)
    assert contrast is None or re.fullmatch(contrast, raised.value.contrast)
