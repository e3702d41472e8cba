"""Blocks of few bits: within half a step of what was quantized, whatever it is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from zerojax.collectives.quantization import LARGEST, dequantize, quantize
from zerojax.plan.quantized import extents

INTEGERS = ("int8", "int4")


def sent(x: Any, block: tuple[int, ...], form: Any) -> tuple[np.ndarray, np.ndarray]:
    """What arrives of ``x``, float32, and each element's scale."""
    got, scales = map(np.asarray, around(x, block, form))
    for axis, extent in enumerate(block):
        scales = np.repeat(scales, extent, axis)
    return got, scales


@functools.partial(jax.jit, static_argnums=(1, 2))
def around(x: Any, block: tuple[int, ...], form: Any) -> tuple[jax.Array, jax.Array]:
    codes, scales = quantize(x, block, form)
    return dequantize(codes, scales, form, jnp.float32), scales


FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@pytest.mark.parametrize("form", INTEGERS)
@settings(max_examples=30)
@given(x=arrays.arrays(np.float32, (4, 12), elements=FLOATS))
def test_within_half_a_step(form: Any, x: np.ndarray) -> None:
    for block in ((1, 12), (2, 6), (4, 2)):
        got, scales = sent(x, block, form)
        # Products and quotients are rounded to 24 bits; what is too small for a scale is 0.
        bound = 0.5 * scales * (1 + 2.0**-20) + np.where(scales == 0, 2.0**-118, 0)
        assert (np.abs(got - x) <= bound).all()


@settings(max_examples=60)
@given(x=arrays.arrays(np.float32, (2, 8), elements=FLOATS))
def test_float8_within_its_rounding(x: np.ndarray) -> None:
    got, scales = sent(x, (1, 8), "float8_e4m3fn")
    # Three bits of a mantissa, and denormal codes of 2**-9 of a scale.
    bound = np.maximum(np.abs(x) * 2.0**-4, scales * 2.0**-10) * 1.001
    assert (np.abs(got - x) <= bound + np.where(scales == 0, 2.0**-116, 0)).all()


@pytest.mark.parametrize("form", LARGEST)
def test_what_is_sent_again_stays(form: Any) -> None:
    """A parameter that was gathered between partitions is quantized once more within one."""
    x = jax.random.normal(jax.random.key(0), (8, 512))
    once, scales = sent(x, (1, 256), form)
    twice, _ = sent(once, (1, 256), form)
    np.testing.assert_allclose(twice, once, atol=scales.max() * 1e-4)


@pytest.mark.parametrize("form", LARGEST)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(form: Any, bad: float) -> None:
    x = np.ones((2, 8), np.float32)
    x[1, 3] = bad
    got, _ = sent(x, (1, 8), form)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[0], 1, rtol=1e-6)


def test_four_bits_are_packed() -> None:
    codes, scales = quantize(jnp.arange(32.0).reshape(2, 16), (1, 16), "int4")
    assert (codes.shape, codes.dtype, scales.shape) == ((2, 8), jnp.uint8, (2, 1))
    assert dequantize(codes, scales, "int4", jnp.bfloat16).dtype == jnp.bfloat16


@settings(max_examples=100)
@given(
    piece=st.lists(st.integers(1, 3000), min_size=1, max_size=3),
    size=st.sampled_from([None, 64, 128, 256]),
)
def test_blocks_divide_a_piece(piece: list[int], size: int | None) -> None:
    block = extents(piece, size)
    if block is None:
        assert size is not None
        return
    assert all(n % k == 0 for n, k in zip(piece, block, strict=True))
    elements = np.prod(block)
    assert elements == size if size else elements < 4 * 256
