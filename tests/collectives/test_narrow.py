"""A parameter that the body uses in a wider dtype is gathered in its own, backward too."""

from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import gathers

import zerojax
from zerojax.collectives import Inserter, Shard

pytestmark = pytest.mark.usefixtures("quick_compile")

MESH = zerojax.mesh()
N, LAYERS = 16, 3
ROWS, STACKED = ("data", None), (None, "data", None)


def wide(w: Any) -> Any:
    return w.astype("float32")


def head(w: Any, x: Any) -> Any:
    return x @ wide(w).T


def in_heads(w: Any, x: Any) -> Any:
    return jnp.einsum("bi,ihj->bhj", x, wide(w).reshape(N, 2, N // 2))


def widened_before(block: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jax.checkpoint(block)(wide(w), x)


def held_apart(w: Any, x: Any) -> Any:
    return x @ lax.optimization_barrier((wide(w), x))[0]


def layers(*, before: bool, remat: bool) -> Callable[..., Any]:
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ wide(w).T), None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    return lambda w, x: lax.scan(body, x, wide(w) if before else w)[0]


CASES = {
    "head": (head, ROWS),
    "heads": (in_heads, ROWS),
    "remat": (jax.checkpoint(head), ROWS),
    "before remat": (widened_before(lambda w, x: jnp.tanh(x @ w)), ROWS),
    "before remat, transposed": (widened_before(lambda w, x: jnp.tanh(x @ w.T)), ROWS),
    "barrier": (held_apart, ROWS),
    "captured": (
        lambda w, x: lax.scan(lambda x, _: (jnp.tanh(head(w, x)), None), x, None, 2)[0], ROWS,
    ),
    "captured wide": (
        lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, wide(w)[None])[0], ROWS,
    ),
} | {
    f"scan, {before=}, {remat=}": (layers(before=before, remat=remat), STACKED)
    for before in (False, True)
    for remat in (False, True)
}  # fmt: skip


def inserted(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """The gradients of ``function(w, x)`` at stage 3."""
    inserter = Inserter(MESH, "data", keep=False)

    def run(w: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(
            jax.grad(lambda w, x: jnp.sum(function(w, x) ** 2), argnums=(0, 1))
        )(w, x)
        return inserter(closed, [Shard(inserter.constrain(w, spec), spec), x])

    return run


def arguments(spec: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(LAYERS, N, N)[-len(spec) :]), "bfloat16")
    return w, rng.normal(size=(4, N)).astype("float32")


@pytest.mark.parametrize("name", CASES)
def test_gathered_before_it_is_widened(name: str) -> None:
    function, spec = CASES[name]
    found = gathers(jax.make_jaxpr(inserted(function, spec))(*arguments(spec)))
    assert {move.dtype for move in found} == {"bfloat16"}
    assert len(found) >= 2  # forward and backward


@pytest.mark.parametrize("name", CASES)
def test_what_is_inserted_is_an_identity(name: str) -> None:
    function, spec = CASES[name]
    plain = jax.grad(lambda w, x: jnp.sum(function(w, x) ** 2), argnums=(0, 1))
    assert exact.differing(inserted(function, spec), plain, *arguments(spec)) == []


SCALES = jnp.linspace(0.01, 0.02, N)


def scaled(codes: Any) -> Any:
    """A quantized base, each output with a scale of its own."""
    return codes.astype("float32") * SCALES


def looked_up(codes: Any) -> Any:
    """Codes of a table of values, as in NF4."""
    return jnp.linspace(-1, 1, 256)[codes.astype("int32") + 128]


def scaled_in_layers(codes: Any, x: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ scaled(w)), None), prevent_cse=False)
    return lax.scan(layer, x, codes)[0]


INTEGERS: dict[str, tuple[Callable[..., Any], Any, int]] = {
    "scaled": (lambda w, x: jnp.tanh(x @ scaled(w)), ROWS, 2),
    "remat": (jax.checkpoint(lambda w, x: jnp.tanh(x @ scaled(w))), ROWS, 2),
    "layers": (scaled_in_layers, STACKED, 2),
    "looked up": (jax.checkpoint(lambda w, x: jnp.tanh(x @ looked_up(w))), ROWS, 2),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_gathered_before_they_are_widened(name: str) -> None:
    """Forward and backward; the numbers are the same."""
    function, spec, times = INTEGERS[name]
    rng = np.random.default_rng(0)
    codes = rng.integers(-127, 127, size=(LAYERS, N, N)[-len(spec) :], dtype=np.int8)
    x = rng.normal(size=(4, N)).astype("float32")
    inserter = Inserter(MESH, "data", keep=False)
    plain = jax.grad(lambda w, x: jnp.sum(function(w, x) ** 2), argnums=1)

    def run(w: Any, x: Any) -> Any:
        closed = jax.make_jaxpr(plain)(w, x)
        return inserter(closed, [Shard(inserter.constrain(w, spec), spec), x])[0]

    found = gathers(jax.make_jaxpr(run)(codes, x))
    assert [move.dtype for move in found] == ["int8"] * times
    assert exact.differing(run, plain, codes, x) == []
