"""Products as einsums: the letters of the dimensions are the reference."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.graph.contractions import Contraction
from zerojax.xla import jaxprs
from zerojax.xla.types import Equation

EINSUMS = ["ij,jk->ik", "bij,bjk->bik", "bqhd,bkhd->bhqk", "kj,ik->ji", "ij,ji->", "ij,k->ijk"]
SIZES = {letter: 2 + i for i, letter in enumerate("bdhijkq")}


def product(einsum: str) -> Equation:
    """The dot_general of an einsum, whose result has its dimensions in order."""
    left, right, result = letters = re.split(",|->", einsum)
    batched = [x for x in result if x in left and x in right]
    contracted = [x for x in left if x in right and x not in result]

    def dimensions(names: list[str]) -> tuple[list[int], list[int]]:
        return [left.index(x) for x in names], [right.index(x) for x in names]

    x, y = (jnp.ones([SIZES[letter] for letter in each]) for each in letters[:2])
    numbers = dimensions(contracted), dimensions(batched)
    (eqn,) = jax.make_jaxpr(lambda x, y: lax.dot_general(x, y, numbers))(x, y).jaxpr.eqns
    assert eqn.outvars[0].aval.shape == tuple(SIZES[x] for x in result)
    return eqn


@pytest.mark.parametrize("einsum", EINSUMS)
def test_dimensions_with_one_letter_have_one_name(einsum: str) -> None:
    letters, names = re.split(",|->", einsum), Contraction.of(product(einsum)).names
    assert [*map(len, names)] == [*map(len, letters)]
    pairs = {pair for each in zip(letters, names, strict=True) for pair in zip(*each, strict=True)}
    assert len(pairs) == len({x for x, _ in pairs}) == len({name for _, name in pairs})


@pytest.mark.parametrize("einsum", EINSUMS)
def test_what_becomes_of_a_dimension(einsum: str) -> None:
    *operands, result = re.split(",|->", einsum)
    contraction = Contraction.of(product(einsum))
    for i, (letters, other) in enumerate(zip(operands, operands[::-1], strict=True)):
        dims = {x: d for d, x in enumerate(letters)}
        assert contraction.free(i) == [d for x, d in dims.items() if x not in other]
        places = {d: result.index(x) for x, d in dims.items() if x in result}
        assert contraction.places(i) == places
        assert {*contraction.contracted[i]} == {*dims.values()} - places.keys()
        assert {*contraction.batched[i]} == {dims[x] for x in dims.keys() & {*other} & {*result}}


def test_a_product_along_other_dimensions() -> None:
    x, y = np.arange(6.0).reshape(2, 3), np.arange(6.0)[::-1].reshape(2, 3)
    eqn = product("ij,k->ijk")
    params = Contraction.of(eqn).params(([1], [1]), ([0], [0]))
    (result,) = jaxprs.bind(eqn, [x, y], params)
    np.testing.assert_array_equal(result, np.einsum("bi,bi->b", x, y))


def test_other_equations_are_none() -> None:
    (eqn,) = jax.make_jaxpr(jnp.negative)(1.0).jaxpr.eqns
    assert Contraction.of(eqn) is None
