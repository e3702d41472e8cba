"""The micro-batch's program with the global batch's number of rows.

A mean over rows divides by their number. With the global batch's number instead, each micro-batch
computes its share of the global mean, so that the shares add up, and so do their gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Path
from zerojax.accumulation.pairs import (
    EquationPair,
    Sizes,
    alike_in_shape,
    other_literals,
    other_numbers,
    pairs,
)
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Equation


def with_global_sizes(analysis: Analysis) -> list[Equation]:
    """Returns the micro-batch's equations in order, with the numbers of the global batch."""
    return [_equation(pair, (i,), analysis) for i, pair in enumerate(analysis.pairs)]


def _equation(pair: EquationPair, path: Path, analysis: Analysis) -> Equation:
    """Returns a micro-batch's equation with the numbers of the global batch, in its inner programs
    too. Equations at the paths ``analysis.literals`` keep the micro-batch's own numbers."""
    global_eqn, micro_eqn = pair
    atoms = list(zip(global_eqn.invars, micro_eqn.invars, strict=True))
    changes: dict[str, object] = {}
    if path not in analysis.literals and _counts_rows(pair, analysis.sizes):
        values = [w if isinstance(w, core.Literal) else m for w, m in atoms]
        return global_eqn.replace(invars=values, outvars=micro_eqn.outvars)
    for position, name in enumerate(jaxprs.programs(micro_eqn)):
        w, m = jaxprs.param(global_eqn, name), jaxprs.param(micro_eqn, name)
        if isinstance(m, tuple):
            both = enumerate(zip(w, m, strict=True))
            changes[name] = tuple(_body(*each, (*path, i), analysis) for i, each in both)
        else:
            changes[name] = _body(w, m, (*path, position), analysis)
    eqn = micro_eqn
    if any(changes[name] is not micro_eqn.params[name] for name in changes):
        eqn = eqn.replace(params=micro_eqn.params | changes)
    if path in analysis.literals or not any(other_literals(w, m) for w, m in atoms):
        return eqn
    return eqn.replace(invars=[w if other_literals(w, m) else m for w, m in atoms])


def changed_rule(analysis: Analysis, rules: Collection[core.Primitive]) -> Equation | None:
    """Returns the first call of one of the primitives ``rules``, in loops and calls too, inside
    which the micro-batch would have numbers of the global batch; None if there is none."""

    def first(both: Iterable[EquationPair], inside: bool) -> Equation | None:
        for pair in both:
            within = inside or pair.global_eqn.primitive in rules
            if inside and (
                _counts_rows(pair, analysis.sizes)
                or any(map(other_literals, *(e.invars for e in pair)))
            ):
                return pair.global_eqn
            for w, m in zip(*map(jaxprs.inner, pair), strict=False):
                if (found := first(pairs(w, m, analysis.sizes), within)) is not None:
                    return pair.global_eqn if pair.global_eqn.primitive in rules else found
        return None

    return first(analysis.pairs, False)


def _counts_rows(pair: EquationPair, sizes: Sizes) -> bool:
    """Returns whether an equation without rows in its operands and results depends on their number
    all the same: by a parameter such as the length of a loop, or by an inner array that grows."""
    if not alike_in_shape(pair):
        return False
    if pair.global_eqn.primitive is prims.scan_p:
        lengths = [jaxprs.param(eqn, "length") for eqn in pair]
        if lengths[0] != lengths[1]:
            return True
    if not jaxprs.programs(pair.global_eqn):
        return other_numbers(pair)
    bodies = zip(*map(jaxprs.inner, pair), strict=False)
    inside = (pairs(w, m, sizes) for w, m in bodies)
    return any(
        not alike_in_shape(each) or _counts_rows(each, sizes)
        for each in itertools.chain.from_iterable(inside)
    )


def _body(
    global_jaxpr: AnyJaxpr, micro_jaxpr: AnyJaxpr, path: Path, analysis: Analysis
) -> AnyJaxpr:
    inside, outside = jaxprs.open_jaxpr(micro_jaxpr)[0], jaxprs.open_jaxpr(global_jaxpr)[0]
    both = enumerate(pairs(outside, inside, analysis.sizes))
    eqns = [_equation(pair, (*path, i), analysis) for i, pair in both]
    if all(new is old for new, old in zip(eqns, inside.eqns, strict=True)):
        return micro_jaxpr
    return jaxprs.with_body(micro_jaxpr, inside.replace(eqns=eqns))
