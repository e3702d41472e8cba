"""Rows that do not count change no reduction."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.accumulation.reductions import REDUCTIONS

VALUES = {
    "float32": [-jnp.inf, -3.0, 0.0, 2.5, jnp.inf],
    "bfloat16": [-3.0, 0.0, 2.5],
    "int32": [-(2**31), -3, 0, 2**31 - 1],
    "uint8": [0, 5, 255],
    "bool": [False, True],
}
CASES = [
    *itertools.product(("sum", "max", "min", "prod"), ("float32", "bfloat16", "int32", "uint8")),
    *itertools.product(("and", "or"), ("int32", "uint8", "bool")),
]


def test_every_reduction_is_here() -> None:
    assert {name for name, _ in CASES} == {*REDUCTIONS}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_neutral_element(name: str, dtype: str) -> None:
    reduction, values = REDUCTIONS[name], jnp.array(VALUES[dtype], dtype)
    neutral = jnp.full_like(values, reduction.neutral(values.dtype))
    np.testing.assert_array_equal(reduction.of_two(values, neutral), values)
    np.testing.assert_array_equal(reduction.over(jnp.stack([values, neutral]), (0,)), values)
