"""Functions of one matrix, applied to the matrices of a tree: the marks of what devices share.

:func:`over_matrices` applies a function as one call for each array, which
:mod:`zerojax.collectives.matrices` finds by its name and runs for equal matrices together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import primitives as prims

from zerojax.graph.def_use import graph_of
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation, PyTree

Function = Callable[[jax.Array], jax.Array]
"""A function of a matrix [m, n], which returns another one [m, n]."""

CALL = "zerojax_over_matrices"
"""The name of the calls of :func:`over_matrices`."""


def over_matrices(fn: Function) -> Callable[[PyTree], PyTree]:
    r"""Applies a function of one matrix to every matrix of a tree.

    .. math:: y_{i, :, :} = f(x_{i, :, :})

    for all leading indices :math:`i` of each array. An optimizer that computes with matrices in
    full, such as Muon, needs it under ZeRO, which shards every matrix: in a decorated step each
    device computes with some of the matrices. An all-to-all brings them there, and another brings
    the results back to the shards. Those of one shape and dtype run as one stack; those that do not
    divide among the devices are sent together, whatever their shapes, one to a device. XLA would
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
