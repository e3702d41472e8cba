"""Jaxprs rewritten equation by equation, and equations with other variables."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Rewriter, renamed, replaced, traced

X = jnp.ones(3)


class Doubled(Rewriter):
    """Replaces sines by two equations, a cosine and a product."""

    def equation(self, eqn: Any, jaxpr: Any) -> Sequence[Any]:
        assert eqn in jaxpr.eqns
        if eqn.primitive.name == "sin":
            return replaced(eqn, lambda x: 2 * jnp.cos(x), eqn.invars)
        return super().equation(eqn, jaxpr)


@jax.jit
def layer(x: Any) -> Any:
    return jnp.sin(x) + 1


def everywhere(x: Any) -> Any:
    """Sines in a call, a loop, both branches and the condition of a loop."""
    x = lax.scan(lambda c, y: (layer(c) * y, None), layer(x), x)[0]
    x = lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.sin(x) * x, x)
    return lax.while_loop(lambda x: jnp.sin(x).sum() < 0, jnp.sin, x)


def test_every_program_is_rewritten_once() -> None:
    closed = jax.make_jaxpr(everywhere)(X)
    new = Doubled()(closed)
    assert " sin " not in str(new)
    (call, loop, *_) = (e for e in new.eqns if e.primitive.name in ("jit", "scan"))
    (inner,) = (e for e in jaxprs.param(loop, "jaxpr").eqns if e.primitive.name == "jit")
    assert jaxprs.called_jaxpr(call) is jaxprs.called_jaxpr(inner)
    cosines = jax.make_jaxpr(lambda x: 2 * jnp.cos(x) + 1)(X)
    (got,) = jaxprs.evaluate(jaxprs.called_jaxpr(call), [X])
    assert jnp.array_equal(got, jaxprs.evaluate(cosines, [X])[0])


def test_a_program_in_which_nothing_changes_is_the_same() -> None:
    closed = jax.make_jaxpr(lambda x: lax.scan(lambda c, y: (c * y, y), x[0], x))(X)
    assert Doubled()(closed) is closed


def test_an_equation_may_go() -> None:
    class Fewer(Rewriter):
        def equation(self, eqn: Any, jaxpr: Any) -> Sequence[Any]:
            return [] if eqn.primitive.name == "cos" else super().equation(eqn, jaxpr)

    closed = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x))[0])(X)
    assert [e.primitive.name for e in Fewer()(closed).eqns] == ["sin"]


def test_equations_with_other_variables() -> None:
    jaxpr, _ = jaxprs.open_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(X))
    (x,), (out,) = jaxpr.invars, jaxpr.outvars
    other = jaxprs.new_variable(x.aval)
    sine, product = renamed(jaxpr.eqns, {x: other, out: x})
    assert (sine.invars, product.outvars) == ([other], [x])
    assert product.invars[0] is sine.outvars[0] is jaxpr.eqns[0].outvars[0]
    _, product = renamed(jaxpr.eqns, {}, lambda eqn: {"new": eqn.primitive.name})
    assert product.params["new"] == "mul"


def test_equations_of_a_function() -> None:
    (x,) = jaxprs.open_jaxpr(jax.make_jaxpr(jnp.sin)(X))[0].invars
    equations, results = traced(lambda a, b: a * b, [x, x])
    (product,) = equations
    assert (product.invars, product.outvars) == ([x, x], results)
