"""Traces functions and expands "hijax", the calls of JAX that hold no jaxpr.

Rematerialized blocks under ``jax_remat3``, functions with derivatives of their own under
``jax_custom_vjp3`` and ``jax_custom_jvp3``, and primitives that users derive from
``jax.experimental.hijax`` hold a Python object in place of a jaxpr, which no rule can read.
``jax.jit`` replaces each with the computation of ``Primitive.to_lojax``; JAX exports no way to do
so earlier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.extend import core, source_info_util
from jax.extend.core import primitives as prims

from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Rewriter
from zerojax.xla.types import Equation, Jaxpr, PyTree


def trace(function: Callable[..., object], *args: object) -> tuple[core.ClosedJaxpr, PyTree]:
    """Returns the closed jaxpr of ``function(*args)``, and the shapes that the function returns.

    In the jaxpr, hijax is replaced by calls of the jaxprs that it runs, at any depth. Custom
    derivatives are lost: the jaxpr must not be differentiated.

    Raises:
      NotImplementedError: An operand or a result is not an array.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return _Opener()(closed), shapes


class _Opener(Rewriter):
    """Replaces hijax in jaxprs."""

    def body(self, jaxpr: Any) -> Jaxpr:
        """Returns an open jaxpr without hijax; the jaxpr itself if it has none."""
        # JAX keeps the flag beside the equations, and would go on to expand them.
        opened = super().body(jaxpr).replace(is_high=False) if jaxpr.is_high else jaxpr
        return cast(Jaxpr, opened)

    def equation(self, eqn: Equation, jaxpr: Jaxpr) -> Sequence[Equation]:
        operands = [v.aval for v in eqn.invars]
        if not eqn.primitive.is_high(*operands, **eqn.params):
            return [eqn]
        _check_arrays(eqn)
        # A call or a loop is "high" only because of what it holds.
        if next(jaxprs.inner(eqn), None) is not None:
            return [self.inside(eqn, eqn.params)]
        # As jax.jit does when it lowers a program.
        run = functools.partial(eqn.primitive.to_lojax, **eqn.params)
        with jaxprs.traced_where(eqn):
            body = self(jax.make_jaxpr(run)(*operands))
        return [eqn.replace(primitive=prims.closed_call_p, params={"call_jaxpr": body})]


def _check_arrays(eqn: Any) -> None:
    if any(v.aval.is_high for v in (*eqn.invars, *eqn.outvars)):
        hijax = jaxprs.param(eqn, "_prim", None)
        name = eqn.primitive.name if hijax is None else type(hijax).__name__
        raise NotImplementedError(
            f"zerojax cannot read {name} at {source_info_util.summarize(jaxprs.source(eqn))}: pass "
            "only arrays."
        )
