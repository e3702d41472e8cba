"""The dataflow engine, held against what each function computes."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from zerojax.graph.analysis import Analysis
from zerojax.xla import jaxprs

X = jnp.arange(4.0)


def any_of(eqn: Any, facts: Sequence[bool]) -> list[bool]:
    return [any(facts)] * len(eqn.outvars)


DEPENDS: Analysis[bool] = Analysis(False, operator.or_, any_of)
NEEDED: Analysis[bool] = Analysis(
    False, operator.or_, lambda eqn, facts: [any(facts)] * len(eqn.invars)
)


def opened(function: Any, *args: Any) -> Any:
    return jaxprs.open_jaxpr(jax.make_jaxpr(function)(*args))[0]


def straight(x: Any, y: Any, z: Any) -> Any:
    return jnp.sin(x), x * y, z, 2.0


def called(x: Any, y: Any, z: Any) -> Any:
    return jax.jit(lambda a, b: (b, a))(x, y)[0], jax.checkpoint(jnp.multiply)(y, z)


def passed_on(x: Any, y: Any, z: Any) -> Any:
    """A value comes three iterations later: the loop is run until nothing changes."""
    return lax.fori_loop(0, 5, lambda i, c: (c[1], c[2], c[0] * 2), (x, y, z))[:1]


def scanned(x: Any, y: Any, z: Any) -> Any:
    (a, b), c = lax.scan(lambda c, e: ((c[0] + 1, c[1] * e), c[0]), (x[0], y[0]), z)
    return a, b, c


def decided_by_a_condition(x: Any, y: Any, z: Any) -> Any:
    return lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (c[0] + x, c[1] * 2), (z, y))


def overwritten(x: Any, y: Any, z: Any) -> Any:
    """Without an iteration the result is the start value, whatever the body writes."""
    loop = lax.while_loop(lambda c: c[0].sum() < 3, lambda c: (c[0] + 1, c[0]), (x, y))[1]
    return loop, lax.scan(lambda c, _: (x, None), z, None, length=0)[0]


def decided_by_an_index(x: Any, y: Any, z: Any) -> Any:
    return lax.cond(x[0] > 0, lambda y, z: (y, z), lambda y, z: (y * 2, y), y, z)


CASES: list[tuple[Callable[..., Any], list[str]]] = [
    (straight, ["x", "xy", "z", ""]),
    (called, ["y", "yz"]),
    (overwritten, ["xy", "xz"]),
    (passed_on, ["xyz"]),
    (scanned, ["x", "yz", "x"]),
    (decided_by_a_condition, ["xz", "xyz"]),
    (decided_by_an_index, ["xy", "xyz"]),
]


@pytest.mark.parametrize(("function", "wanted"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_forward(function: Callable[..., Any], wanted: list[str]) -> None:
    jaxpr = opened(function, X, X, X)
    found = [DEPENDS.forward(jaxpr, [name == x for x in "xyz"]).ends for name in "xyz"]
    by_result = ["".join(n for n, yes in zip("xyz", each, strict=True) if yes)
                 for each in zip(*found, strict=True)]  # fmt: skip
    assert by_result == wanted


def test_without_control() -> None:
    analysis: Analysis[bool] = Analysis(False, operator.or_, any_of, control=False)
    jaxpr = opened(decided_by_an_index, X, X, X)
    assert analysis.forward(jaxpr, [True, False, False]).ends == [False, False]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (straight, [[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]]),
        (called, [[0, 1, 0], [0, 1, 1]]),
        (passed_on, [[1, 1, 1]]),
        (scanned, [[1, 0, 0], [0, 1, 1], [1, 0, 0]]),
    ],
)
def test_backward(function: Callable[..., Any], wanted: list[list[int]]) -> None:
    jaxpr = opened(function, X, X, X)
    n = len(jaxpr.outvars)
    found = [NEEDED.backward(jaxpr, [i == j for j in range(n)]).ends for i in range(n)]
    assert found == [list(map(bool, each)) for each in wanted]


def test_rules() -> None:
    analysis: Analysis[int] = Analysis(0, max, lambda eqn, _: [9] * len(eqn.outvars))

    @analysis.rule("mul", "add")
    def _(eqn: Any, operands: Sequence[int]) -> list[int]:
        return [max(operands)]

    @analysis.rule("scan")
    def _(eqn: Any, operands: Sequence[int]) -> list[int]:
        return [x + 1 for x in analysis.through(eqn, operands)]

    def function(x: Any, y: Any) -> Any:
        return x * y + 1.0, jnp.sin(x), lax.scan(lambda c, e: (c * e, c + e), x[0], y)

    facts = analysis.forward(opened(function, X, X), [1, 2])
    assert facts.ends[:2] == [2, 9]
    assert facts.ends[2:] == [10, 10]  # x[0] is computed by primitives without a rule
    with pytest.raises(ValueError, match="two rules for add"):
        analysis.rule("add", "sub")(lambda eqn, _: [0])


def test_a_program_is_analysed_once_for_each_question() -> None:
    runs: list[str] = []

    def noted(eqn: Any, operands: Sequence[bool]) -> list[bool]:
        runs.append(eqn.primitive.name)
        return any_of(eqn, operands)

    analysis: Analysis[bool] = Analysis(False, operator.or_, noted)
    layer = jax.jit(jnp.tanh)
    jaxpr = opened(lambda x, y: (layer(layer(layer(x))), layer(y)), X, X)
    assert analysis.forward(jaxpr, [True, False]).ends == [True, False]
    assert runs == ["tanh", "tanh"]


def test_programs_inside_equations_are_left_out() -> None:
    """The rule of all primitives is then that of calls and loops too."""
    analysis: Analysis[bool] = Analysis(False, operator.or_, any_of, enters=False)
    assert analysis.forward(opened(scanned, X, X, X), [True, False, False]).ends == [True] * 3
