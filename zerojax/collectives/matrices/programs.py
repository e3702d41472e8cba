"""A function of matrices as a program for one matrix."""

from __future__ import annotations

from typing import Any

import jax

from zerojax.collectives.matrices.entry import Entries, NotByEntry, Stack, run_unplaced
from zerojax.collectives.matrices.find import MatrixFunction
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr


def for_one(function: MatrixFunction) -> tuple[AnyJaxpr, int]:
    """Returns the program for one matrix, and the number of leading dimensions along which the
    function computes each matrix separately.

    The program takes the matrix of each operand and the shared values, and returns the matrix of
    each result. Two functions are equal if the texts of their programs are.
    """
    shapes = [v.aval.shape for v in function.operands]
    program, leading = _program(function), 0
    while all(len(s) > leading + 2 and s[leading] == shapes[0][leading] for s in shapes):
        try:
            program = _of_entry(program, shapes[0][leading], leading, len(shapes))
        except NotByEntry:
            break
        leading += 1
    return _without_leading(program, leading, len(shapes)), leading


def _program(function: MatrixFunction) -> AnyJaxpr:
    """Returns a function as a closed jaxpr of its operands and the shared values."""
    inputs = [*function.operands, *function.shared]

    def run(*args: jax.Array) -> list[Any]:
        env = dict(zip(inputs, args, strict=True))
        for eqn in function.equations:
            outs = run_unplaced(eqn, [jaxprs.read(v, env) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [env[v] for v in function.results]

    return jax.make_jaxpr(run)(*(jaxprs.like(v.aval) for v in inputs))


def _of_entry(closed: AnyJaxpr, count: int, at: int, operands: int) -> AnyJaxpr:
    """Returns a program for arrays with one entry along dimension `at`, from the program for arrays
    with `count` entries. Its first arguments are the `operands`.

    Raises:
      NotByEntry: The entries are not computed separately.
    """
    avals = [v.aval for v in jaxprs.open_jaxpr(closed)[0].invars]
    shapes = [
        (*aval.shape[:at], 1, *aval.shape[at + 1 :]) if i < operands else aval.shape
        for i, aval in enumerate(avals)
    ]

    def run(*args: jax.Array) -> list[Any]:
        stacks = [Stack(x, at if i < operands else None) for i, x in enumerate(args)]
        outs = Entries(count).run(closed, stacks)
        if any(out.at != at for out in outs):
            raise NotByEntry("a result that all entries have in common")
        return [out.value for out in outs]

    return jax.make_jaxpr(run)(*map(jaxprs.like, avals, shapes))


def _without_leading(closed: AnyJaxpr, leading: int, operands: int) -> AnyJaxpr:
    """Returns a program whose arrays lack the leading dimensions, all of size 1."""
    if leading == 0:
        return closed
    avals = [v.aval for v in jaxprs.open_jaxpr(closed)[0].invars]
    shapes = [a.shape[leading:] if i < operands else a.shape for i, a in enumerate(avals)]

    def run(*args: jax.Array) -> list[Any]:
        outs = jaxprs.evaluate(
            closed, [x.reshape(a.shape) for x, a in zip(args, avals, strict=True)]
        )
        return [x.reshape(x.shape[leading:]) for x in outs]

    return jax.make_jaxpr(run)(*map(jaxprs.like, avals, shapes))
