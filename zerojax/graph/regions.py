"""The programs inside an equation, and how their values correspond to its operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax.extend.core import primitives as prims

from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation, Jaxpr, MaybeNone


@dataclass(frozen=True, eq=False)
class Region:
    """A program that an equation runs: a called function, a loop's body or condition, a branch.

    Attributes:
      jaxpr: The program, an open jaxpr.
      operands: For each argument of the program, the position of the operand that it starts from.
      carries: Pairs of positions: a result of the program, and the argument that takes this result
        in the next iteration of a loop.
      entries: For the body of a scan, the position of the first argument that is one entry of its
        operand, or the number of arguments if none is; None for other programs.
      stacked: For the body of a scan, the position of the first result that is one entry of the
        equation's result, or the number of results if none is; None for other programs.
      decides: True for the condition of a loop: the program only decides what runs, and its result
        is not among the equation's results.
      may_be_skipped: True for the body of a loop that may have no iterations, so that the results
        of its carries may be their start values.
    """

    jaxpr: Jaxpr
    operands: Sequence[int]
    carries: Sequence[tuple[int, int]] = ()
    entries: int | None = None
    stacked: int | None = None
    decides: bool = False
    may_be_skipped: bool = False

    def is_entry(self, argument: int) -> bool:
        """Returns whether an argument is one entry of its operand, without the first dimension."""
        return self.entries is not None and argument >= self.entries

    def is_stacked(self, result: int) -> bool:
        """Returns whether a result is one entry of the equation's result, which has one dimension
        more."""
        return self.stacked is not None and result >= self.stacked

    def argument(self, operand: int) -> Atom | MaybeNone:
        """Returns the argument of the program that starts from an operand; None if the program does
        not take this operand."""
        if operand not in self.operands:
            return None
        return self.jaxpr.invars[self.operands.index(operand)]


def regions(equation: Equation) -> tuple[Region, ...]:
    """Returns the programs of a call, a rematerialised block, a function with custom derivatives, a
    loop, a ``cond`` or a ``shard_map``; none for other equations.

    A ``while`` loop has two, the condition first. Programs whose arguments do not correspond to
    operands one by one (the kernel of a ``pallas_call``, the function of a reduction) are not
    regions; :func:`zerojax.xla.jaxprs.inner` finds them.
    """
    primitive, n = equation.primitive, len(equation.invars)
    if primitive in jaxprs.CALLS:
        return (Region(_opened(jaxprs.called_jaxpr(equation)), range(n)),)
    if (scan := jaxprs.scan_parts(equation)) is not None:
        body, carry, entries = _opened(scan.body), scan.carry, scan.first_stack
        pairs = [(i, scan.consts + i) for i in range(carry)]
        is_empty = scan.length == 0
        return (Region(body, range(n), pairs, entries, carry, may_be_skipped=is_empty),)
    if primitive is prims.while_p:
        loop = jaxprs.while_parts(equation)
        # JAX's order of operands: constants of the condition, constants of the body, the carry.
        first, carried = loop.cond_consts, range(loop.cond_consts + loop.body_consts, n)
        pairs = [(i, loop.body_consts + i) for i in range(len(carried))]
        return (
            Region(_opened(loop.cond), [*range(first), *carried], decides=True),
            Region(
                _opened(loop.body),
                [*range(first, carried.start), *carried],
                pairs,
                may_be_skipped=True,
            ),
        )
    if primitive is prims.cond_p:
        branches = jaxprs.param(equation, "branches")
        # The first operand is the index of the branch, which no branch takes.
        return tuple(Region(_opened(branch), range(1, n)) for branch in branches)
    # By name: jax.extend.core.primitives does not have it.
    if primitive.name == "shard_map":
        return (Region(_opened(jaxprs.param(equation, "jaxpr")), range(n)),)
    return ()


def _opened(jaxpr: AnyJaxpr) -> Jaxpr:
    return jaxprs.open_jaxpr(jaxpr)[0]
