"""Arrays from low-bit weights are computed where they are used, with the same numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from jax import lax
from jax.extend.core import jaxpr_as_fun

from zerojax.graph.search import equations
from zerojax.quantize import dequantize
from zerojax.trace.late import with_late_weights
from zerojax.xla.jaxprs import open_jaxpr

pytestmark = pytest.mark.usefixtures("quick_compile")

STACK = (3, 8, 8)


def scanned(stack: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def remat_scanned(stack: jax.Array, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    return lax.scan(lambda x, w: (layer(x, w), w.sum()), x, stack, reverse=True)[0]


def in_a_loop(stack: jax.Array, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, x.shape[0], lambda i, x: scanned(stack, x), x)


def in_a_while_loop(stack: jax.Array, x: jax.Array) -> jax.Array:
    def positive(x: jax.Array) -> jax.Array:
        return (x @ stack[0]).sum() > 0

    return lax.while_loop(positive, lambda x: scanned(stack, x) - 1, x)


def in_a_call(stack: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(in_a_loop)(stack, jax.jit(scanned)(stack, x))


def in_a_branch(stack: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, lambda: scanned(stack, x), lambda: x)


def returned(stack: jax.Array, x: jax.Array) -> Any:
    return scanned(stack, x), stack, stack


def mixed_layers(stack: jax.Array, x: jax.Array) -> jax.Array:
    """Each entry of the transposed array has elements of all layers."""
    return lax.scan(lambda x, w: (x + w.sum(), None), x, stack.transpose(1, 0, 2))[0]


def carried(stack: jax.Array, x: jax.Array) -> jax.Array:
    final, _ = lax.scan(lambda c, w: (c * 0.5, c[0] @ x), stack, None, length=2)
    return final.sum() + x


PROGRAMS = [
    scanned,
    remat_scanned,
    in_a_loop,
    in_a_while_loop,
    in_a_call,
    in_a_branch,
    returned,
    mixed_layers,
    carried,
]
WITHOUT_STACK = [*PROGRAMS[:3], in_a_call, in_a_branch]


def arguments(group_size: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    layers, m, n = STACK
    codes = jax.random.randint(keys[0], STACK, -127, 128, jnp.int8)
    scales = jax.random.normal(keys[1], (layers, m // (group_size or m), n)) / 127
    return codes, scales, jax.random.normal(keys[2], (n,))


def dequantized(codes: jax.Array, scales: jax.Array) -> jax.Array:
    layers, _, n = codes.shape
    groups = codes.astype(scales.dtype).reshape(layers, scales.shape[1], -1, n)
    return (groups * scales[:, :, None]).reshape(codes.shape)


def dequantized_any(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Of one layer too."""
    is_layer = codes.ndim == 2
    given = (codes[None], scales[None]) if is_layer else (codes, scales)
    return dequantized(*given)[0] if is_layer else dequantized(*given)


@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_the_same(program: Any, group_size: int | None) -> None:
    def run(codes: jax.Array, scales: jax.Array, x: jax.Array) -> Any:
        return program(dequantized(codes, scales), x)

    given = arguments(group_size)
    traced = jax.make_jaxpr(run)(*given)
    late: Any = with_late_weights(traced, 2)
    found, expected = (jaxpr_as_fun(each)(*given) for each in (late, traced))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    has_stack = any(
        v.aval.shape == STACK and v.aval.dtype == jnp.float32
        for eqn in equations(open_jaxpr(late)[0])
        for v in eqn.outvars
    )
    assert has_stack != (program in WITHOUT_STACK)


def nf4(codes: jax.Array, scales: jax.Array) -> jax.Array:
    return dequantize(qwix.QArray(codes, scales, None, "nf4"))


def nf4_as_qwix(codes: jax.Array, scales: jax.Array) -> jax.Array:
    one = qwix.dequantize
    both = one if codes.ndim == 2 else jax.vmap(one)
    return both(qwix.QArray(codes, scales, None, "nf4"))


def unrolled(values: Any, codes: Any, scales: Any, low: Any, x: Any) -> Any:
    for one_codes, one_scales, one_low in zip(codes, scales, low, strict=True):
        x = jnp.tanh(x @ values(one_codes, one_scales) + x @ one_low)
    return x.sum()


def over_stack(values: Any, codes: jax.Array, scales: jax.Array, low: Any, x: Any) -> Any:
    def layer(x: Any, each: Any) -> Any:
        w, low = each
        # A cast in the layer, as flax has it, is what the backward pass would keep.
        return jnp.tanh(x @ w.astype(jnp.bfloat16).astype(x.dtype) + x @ low), None

    return lax.scan(layer, x, (values(codes, scales), low))[0].sum()


def by_layer(values: Any, codes: jax.Array, scales: jax.Array, low: Any, x: Any) -> Any:
    def layer(x: Any, each: Any) -> Any:
        codes, scales, low = each
        return jnp.tanh(x @ values(codes, scales) + x @ low), None

    return lax.scan(layer, x, (codes, scales, low))[0].sum()


@pytest.mark.parametrize("values", [dequantized_any, nf4, nf4_as_qwix])
@pytest.mark.parametrize("program", [unrolled, over_stack, by_layer])
def test_adapters_train_over_codes_alone(program: Any, values: Any) -> None:
    """No array is dequantized for the backward pass before that begins."""
    shape, keys = (3, 16, 16), jax.random.split(jax.random.key(0), 4)
    dtype = jnp.int4 if values is dequantized_any else jnp.uint4
    codes = jax.random.randint(keys[0], shape, 0, 8, jnp.int8).astype(dtype)
    scales = jax.random.normal(keys[1], (3, 2, 16)) / 7
    low, x = jax.random.normal(keys[2], shape) / 9, jax.random.normal(keys[3], (5, 16))

    def step(codes: Any, scales: Any, low: Any, x: Any) -> Any:
        loss = functools.partial(program, values)
        return jax.value_and_grad(loss, argnums=2)(codes, scales, low, x)

    given: Any = codes, scales, low, x
    if program is unrolled:
        given = [*codes], [*scales], [*low], x
    traced = jax.make_jaxpr(step)(*given)
    late: Any = with_late_weights(traced, len(jax.tree.leaves(given[:2])))
    flat = jax.tree.leaves(given)
    for a, b in zip(*(jaxpr_as_fun(each)(*flat) for each in (late, traced)), strict=True):
        np.testing.assert_array_equal(a, b)
    found = [*equations(open_jaxpr(late)[0])]
    results = [v.aval for eqn in found for v in eqn.outvars]
    stacks = [x for x in results if x.shape == shape and jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(stacks) == (0 if program is unrolled else 1)  # the gradient of the adapters
    if program is unrolled:  # the first layer's input has no gradient
        times = [sum(v in eqn.invars for eqn in found) for v in open_jaxpr(late)[0].invars[:3]]
        assert times == [1, 2, 2]


def test_a_vector_that_is_read_by_layer_and_in_full() -> None:
    """As wide as there are layers."""

    def run(codes: jax.Array, scale: jax.Array, x: jax.Array) -> jax.Array:
        both = scale[:, None, None] * jnp.broadcast_to(scale, codes.shape)
        return scanned(codes.astype(jnp.float32) * both, x)

    given = jnp.ones((4, 4, 4), jnp.int8), jnp.arange(4.0), jnp.arange(4.0) / 10
    traced = jax.make_jaxpr(run)(*given)
    found, expected = (
        jaxpr_as_fun(each)(*given) for each in (with_late_weights(traced, 2), traced)
    )
    np.testing.assert_array_equal(found[0], expected[0])


def test_other_programs_are_unchanged() -> None:
    def run(codes: jax.Array, scales: jax.Array, x: jax.Array) -> Any:
        return codes[0].max() + scanned(scales * jnp.outer(x, x), x)

    codes, scales, x = arguments(None)
    traced: Any = jax.make_jaxpr(run)(codes, scales, x)
    assert with_late_weights(traced, 2) is traced
    quantized: Any = jax.make_jaxpr(lambda *args: scanned(dequantized(*args[:2]), args[2]))(
        codes, scales, x
    )
    assert with_late_weights(quantized, 0) is quantized
