"""Element by element: what such a primitive gives for a part is that part of what it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.graph.primitives import ELEMENTWISE

X = np.linspace(0.1, 0.9, 12, dtype="float32").reshape(4, 3)

FUNCTIONS = {
    "add": lambda x: x + x,
    "integer_pow": lambda x: x**3,
    "select_n": lambda x: lax.select(x > 0.5, x, -x),
    "convert_element_type": lambda x: x.astype(jnp.bfloat16),
    "erf": lax.erf,
    "logistic": lax.logistic,
    "tanh": jnp.tanh,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_part_of_the_result_is_the_result_of_a_part(name: str) -> None:
    function = FUNCTIONS[name]
    used = {eqn.primitive.name for eqn in jax.make_jaxpr(function)(X).eqns}
    assert name in used <= ELEMENTWISE
    np.testing.assert_array_equal(function(jnp.asarray(X))[1:3], function(jnp.asarray(X[1:3])))


@pytest.mark.parametrize(
    "name", ["dot_general", "reduce_sum", "cumsum", "sort", "transpose", "gather", "scan"]
)
def test_what_looks_at_other_elements_is_none(name: str) -> None:
    assert name not in ELEMENTWISE
