"""Functions of one matrix, applied to the matrices of a tree: the marks of what devices share.

:func:`over_matrices` applies a function as one call for each array, which
:mod:`zerojax.collectives.matrices` finds by its name and runs for equal matrices together.
``optax.contrib.muon`` does not call it; :func:`with_muon_calls` replaces the equations of its
orthogonalization.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as prims
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from zerojax.graph.def_use import graph_of
from zerojax.graph.search import literals, named
from zerojax.xla import jaxprs
from zerojax.xla.rewriter import Rewriter, with_equations
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, PyTree

Function = Callable[[jax.Array], jax.Array]
"""A function of a matrix [m, n], which returns another one [m, n]."""

CALL = "zerojax_over_matrices"
"""The name of the calls of :func:`over_matrices`."""


def over_matrices(fn: Function) -> Callable[[PyTree], PyTree]:
    r"""Applies a function of one matrix to every matrix of a tree.

    .. math:: y_{i, :, :} = f(x_{i, :, :})

    for all leading indices :math:`i` of each array. An optimizer that computes with matrices in
    full, such as Muon, needs it under ZeRO, which shards every matrix: in a decorated step each
    device computes with some of the matrices. Those of one shape and dtype become one stack, an
    all-to-all brings them there, and another brings the results back to the shards. XLA would
    gather every matrix on every device. Cast before the call: the arrays are sent in their dtype.

    In other programs, at stage 0 and on one device it is ``jax.lax.map``. The numbers are the same.

    Args:
      fn: A function of a matrix [m, n] that returns a matrix [m, n], of any dtype. It may read
        other values, such as coefficients, but no other matrix of the tree.

    Returns:
      A function of a tree of arrays [..., m, n] that returns a tree of arrays of the same shapes.

    Raises:
      ValueError: An array has fewer than two dimensions, or ``fn`` returns another shape.

    Example:
      >>> import jax.numpy as jnp, zerojax
      >>> cubed = zerojax.over_matrices(lambda m: m @ m.T @ m)
      >>> out = cubed({"one": jnp.eye(2, 3), "layers": jnp.ones((5, 2, 3))})
      >>> out["one"].shape, float(out["layers"][4, 1, 2])
      ((2, 3), 6.0)
    """

    def zerojax_over_matrices(stack: jax.Array) -> jax.Array:
        outs: jax.Array = lax.map(fn, stack)
        return outs

    call = jax.jit(zerojax_over_matrices)

    def of_leaf(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path) or "the array"
        if x.ndim < 2:
            raise ValueError(
                f"over_matrices: {name} has shape {x.shape}, not [..., m, n]: leave it out "
                "(optax.masked)."
            )
        out: jax.Array = call(x.reshape(-1, *x.shape[-2:]))
        if out.shape[1:] != x.shape[-2:]:
            raise ValueError(
                f"over_matrices: the function returns {out.shape[1:]} for the matrix {name} of "
                f"{x.shape[-2:]}: return a matrix of the same shape."
            )
        return out.reshape(x.shape)

    return functools.partial(jax.tree_util.tree_map_with_path, of_leaf)


def is_call(eqn: Equation) -> bool:
    """Returns whether an equation is a call of :func:`over_matrices`. Its last operand is the stack
    of matrices; the others are values that the function reads."""
    return eqn.primitive is prims.jit_p and jaxprs.param(eqn, "name") == CALL


def program_for_one(call: Equation) -> AnyJaxpr:
    """Returns the program that a call runs for each matrix."""
    (body,) = jaxprs.bodies(call)
    (loop,) = graph_of(body).named("scan")
    return jaxprs.scan_parts(loop).body


def run_call(call: Equation, shared: Sequence[object], stack: jax.Array) -> jax.Array:
    """Runs a call for a stack of any number of matrices, side by side.

    Args:
      call: The call.
      shared: Its operands before the stack.
      stack: The matrices [count, m, n].
    """

    def run(eqn: Equation, values: list[Any]) -> Sequence[Any]:
        if (loop := jaxprs.scan_parts(eqn)) is None:
            return jaxprs.bind_anywhere(eqn, values)
        *read, matrices = values
        run_one = lambda m: jaxprs.evaluate(loop.body, [*read, m], jaxprs.bind_anywhere)  # noqa: E731
        return jax.vmap(run_one)(matrices)

    return jaxprs.evaluate(jaxprs.called_jaxpr(call), [*shared, stack], run)[0]  # type: ignore[no-any-return]


def with_muon_calls(closed: AnyJaxpr) -> AnyJaxpr:
    """Returns a traced program in which the orthogonalization of ``optax.contrib.muon`` is a call
    of :func:`over_matrices`, one for each array; the program itself if it has none.

    The frames of an equation tell whether optax's function traced it. Such equations are replaced
    if that function, called again, traces to the same equations. Calls and branches are entered.

    Args:
      closed: The program, as traced: its calls have not been inlined.
    """
    rewritten: AnyJaxpr = _Muon()(closed)
    return rewritten


class _Muon(Rewriter):
    """Replaces the equations of optax's orthogonalization in calls and branches."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, Jaxpr | None] = {}

    def body(self, jaxpr: Jaxpr) -> Jaxpr:
        new: list[Equation] = []
        for block, is_muon in _blocks(jaxpr):
            if is_muon:
                new += self._as_call(jaxpr, block) or block
            else:
                new += map(self._inside, block)
        return with_equations(jaxpr, new)

    def _inside(self, eqn: Equation) -> Equation:
        is_entered = bool(jaxprs.bodies(eqn)) and not is_call(eqn)
        return self.inside(eqn, jaxprs.programs(eqn)) if is_entered else eqn

    def _as_call(self, jaxpr: Jaxpr, block: list[Equation]) -> list[Equation]:
        """Returns the call of :func:`over_matrices` that takes the place of ``block``; none if
        optax's function is not found to trace to ``block``."""
        given, results = graph_of(jaxpr).boundary(block)
        given.sort(key=lambda v: -v.aval.ndim)
        if len(given) != 2 or len(results) != 1 or given[0].aval.shape != results[0].aval.shape:
            return []
        own = jaxpr.replace(constvars=[], invars=given, outvars=results, eqns=block)
        text = str(own)
        if text not in self._calls:
            self._calls[text] = _call_of(own, text)
        program = self._calls[text]
        if program is None:
            return []
        (call,) = program.eqns  # of the program's arguments, its only operands
        names = dict(zip(program.invars, given, strict=True))
        source = jaxprs.source(block[-1])
        operands = [names[v] for v in call.invars]
        return [call.replace(invars=operands, outvars=results, source_info=source)]


def _orthogonalization() -> Callable[..., jax.Array] | None:
    """Returns optax's function; None if this version of optax has none of this name."""
    module = sys.modules[scale_by_muon.__module__]
    return getattr(module, "orthogonalize_via_newton_schulz", None)


def _code_for_one() -> CodeType | None:
    """Returns the code of the function within optax's for one matrix, which ``jax.vmap`` maps."""
    inside = getattr(getattr(_orthogonalization(), "__code__", None), "co_consts", ())
    named = (c for c in inside if isinstance(c, CodeType) and c.co_name == "_orthogonalize")
    return next(named, None)


def _blocks(jaxpr: Jaxpr) -> Iterator[tuple[list[Equation], bool]]:
    """Yields successive equations that belong together, and whether they are one run of optax's
    orthogonalization: its instructions come in order, so that the next run begins where an earlier
    instruction, or the same one, reads nothing of this run."""
    code, last = _code_for_one(), -1
    block: list[Equation] = []
    computed: set[Atom] = set()
    for eqn in jaxpr.eqns:
        at = _place(eqn, code)
        is_other = (at < 0) != (last < 0)
        is_again = 0 <= at <= last and computed.isdisjoint(jaxprs.variables(eqn.invars))
        if block and (is_other or is_again):
            yield block, last >= 0
            block, computed = [], set()
        block.append(eqn)
        computed.update(eqn.outvars)
        last = at
    if block:
        yield block, last >= 0


def _place(eqn: Equation, code: CodeType | None) -> int:
    """Returns the instruction of ``code`` that traced an equation; -1 if it is not of this code."""
    traceback = jaxprs.source(eqn).traceback
    codes, at = ((), ()) if traceback is None else traceback.raw_frames()
    return at[codes.index(code)] if code in codes else -1


def _call_of(block: Jaxpr, text: str) -> Jaxpr | None:
    """Returns the program of a stack [count, m, n] and coefficients that calls
    :func:`over_matrices` with optax's function, with the arguments with which that traces to
    ``block``, whose text is given; None if none are found."""
    orthogonalize: Any = _orthogonalization()
    numbers = (float(jaxprs.read(v, {})) for v in literals(block) if not v.aval.ndim)
    small = [*dict.fromkeys(x for x in numbers if 0 < x < 1e-2)] or [1e-8]
    steps = [jaxprs.scan_parts(loop).length for loop in named(block, "scan")] or [5]
    shapes = [jaxprs.like(v.aval) for v in block.invars]
    for kind, eps in itertools.product(("frobenius", "aol", "schatten", "spectral"), small):
        function = functools.partial(
            orthogonalize, ns_steps=steps[0], preconditioning=kind, eps=eps
        )
        stacked = functools.partial(function, dimension_numbers=MuonDimensionNumbers(1, 2))
        if str(jaxprs.open_jaxpr(jax.make_jaxpr(stacked)(*shapes))[0]) == text:
            over = lambda x, numbers, f=function: over_matrices(lambda m: f(m, numbers))(x)  # noqa: E731
            return jaxprs.open_jaxpr(jax.make_jaxpr(over)(*shapes))[0]
    return None
