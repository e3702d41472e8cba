"""JAX's coming machinery, behind flags today: steps and functions compute the same numbers."""

import dataclasses
from collections.abc import Callable, Iterator

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

import zerojax
from zerojax.graph.search import equations
from zerojax.xla import hijax, jaxprs
from zerojax.xla.lines import where

pytestmark = pytest.mark.usefixtures("quick_compile")

FLAGS = ("jax_remat3", "jax_custom_vjp3", "jax_custom_jvp3")
X = np.arange(16, dtype=np.float32).reshape(8, 2)


def turn_on(flag: str) -> None:
    if flag not in jax.config.values:
        pytest.skip(f"jax {jax.__version__} has no flag {flag}")
    jax.config.update(flag, True)


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    before = {flag: jax.config.values[flag] for flag in {*FLAGS} & {*jax.config.values}}
    yield
    for flag, value in before.items():
        jax.config.update(flag, value)


@pytest.fixture
def all_flags() -> None:
    """All flags that this jax has."""
    for flag in {*FLAGS} & {*jax.config.values}:
        jax.config.update(flag, True)


def test_no_other_flag_is_known() -> None:
    """``jax_scan3`` has no derivative, and ``jax_use_rgv3`` is about the text of a program."""
    known = {flag for flag in jax.config.values if flag.endswith("3")}
    assert known <= {*FLAGS, "jax_scan3", "jax_use_rgv3"}


@jax.custom_vjp
def halved(x: jax.Array) -> jax.Array:
    return x


halved.defvjp(lambda x: (halved(x), None), lambda _, g: (g / 2,))


@jax.custom_jvp
def doubled(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


doubled.defjvps(lambda g, _, x: 2 * g * jnp.cos(x))


def everything(x: jax.Array) -> jax.Array:
    return halved(doubled(jax.checkpoint(lambda x: checkpoint_name(jnp.tanh(x), "a"))(x)))


def in_a_shard(x: jax.Array) -> jax.Array:
    spec = jax.P("data")
    return jax.shard_map(everything, mesh=zerojax.mesh(), in_specs=spec, out_specs=spec)(x)


DEPTHS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "straight": everything,
    "jit": lambda x: jax.jit(everything)(x),
    "scan": lambda x: lax.scan(lambda c, row: (everything(c) + row, c), x[0], x)[1],
    "while": lambda x: lax.fori_loop(0, x.astype(int)[1, 1], lambda _, x: everything(x), x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, everything, x),
    "vmap": jax.vmap(lambda x: halved(doubled(jax.checkpoint(jnp.tanh)(x)))),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jax.jit(everything)(x) * 2)(x),
    "gradient": lambda x: jax.grad(lambda x: everything(x).sum())(x),
    "shard_map": in_a_shard,
}


@pytest.mark.parametrize("depth", DEPTHS)
def test_calls_are_opened_at_any_depth(depth: str, all_flags: None) -> None:
    function = DEPTHS[depth]
    hidden = jax.make_jaxpr(function)(X)
    assert hidden.is_high
    closed, shapes = hijax.trace(function, X)
    assert not closed.is_high
    names = {e.primitive.name for e in equations(jaxprs.open_jaxpr(closed)[0])}
    assert {"tanh", "sin" if depth != "gradient" else "cos"} <= names
    assert not any(name.startswith("call_hi") for name in names)
    assert shapes == jax.eval_shape(function, X)
    np.testing.assert_allclose(*(core.jaxpr_as_fun(c)(X) for c in (closed, hidden)), 1e-6)


def test_a_program_without_such_calls_is_untouched() -> None:
    with_names = jax.jit(everything)
    assert str(hijax.trace(with_names, X)[0]) == str(jax.make_jaxpr(with_names)(X))


def test_lines_and_shared_programs_are_kept(all_flags: None) -> None:
    layer = jax.jit(everything)
    closed, _ = hijax.trace(lambda x: layer(layer(x)), X)
    first, second = jaxprs.open_jaxpr(closed)[0].eqns
    assert jaxprs.called_jaxpr(first) is jaxprs.called_jaxpr(second)
    lines = [where(e) for e in equations(jaxprs.open_jaxpr(closed)[0])]
    assert all(" at test_hijax.py:" in place for place in lines), lines


@pytest.mark.parametrize(
    ("flag", "name", "stage", "k"),
    [
        ("jax_remat3", "stack_by_index", 3, 4),
        ("jax_remat3", "backward_rematerialized", 3, 1),
        ("jax_custom_vjp3", "backward_by_row", 3, 4),
        ("jax_custom_jvp3", "gpt_remat", 3, 1),
    ],
)
def test_programs_have_the_numbers_of_plain_jit(flag: str, name: str, stage: int, k: int) -> None:
    """In exact arithmetic, as the program is traced anew under the flag."""
    turn_on(flag)
    emitted.check(dataclasses.replace(emitted.source(name)), stage, k)
