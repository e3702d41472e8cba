"""Marks: values of the user's step that zerojax finds again once the step has been traced.

A mark is an identity with a name (``jax.ad_checkpoint.checkpoint_name``), so that it costs
nothing, means nothing outside a decorated step, and survives every transformation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax import compat

GRADIENT = "zerojax gradient"
"""What reaches the optimizer."""
SEED = "zerojax loss scale"
"""The number that the loss is multiplied with before the backward pass: 1, to be replaced."""
WEIGHT = "zerojax weight"
"""The weight of a micro-batch's mean."""

CALLS = {
    prims.jit_p: "jaxpr",
    prims.closed_call_p: "call_jaxpr",
    prims.custom_jvp_call_p: "call_jaxpr",
    prims.custom_vjp_call_p: "call_jaxpr",
    prims.remat_p: "jaxpr",
}
"""Equations that run a jaxpr once on their own operands, and the parameter that holds it."""


def is_mark(eqn: Any, name: str) -> bool:
    return eqn.primitive.name == "name" and eqn.params["name"] == name


def inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters."""
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if hasattr(x, "jaxpr") or hasattr(x, "eqns"):
                yield compat.open_jaxpr(x)[0]


def holds(eqn: Any, name: str) -> bool:
    """Whether the equation is such a mark, or has one in it at any depth."""
    return is_mark(eqn, name) or any(holds(e, name) for jaxpr in inner(eqn) for e in jaxpr.eqns)


def count(jaxpr: Any, name: str) -> tuple[int, int]:
    """How many such marks run once, and how many stand in loops or branches.

    The recomputation of a rematerialised block is left out: it repeats marks.
    """
    straight = looped = 0
    for eqn in jaxpr.eqns:
        if is_mark(eqn, name):
            straight += 1
        elif eqn.primitive in CALLS:
            if not eqn.params.get("differentiated"):
                more = count(compat.open_jaxpr(eqn.params[CALLS[eqn.primitive]])[0], name)
                straight, looped = straight + more[0], looped + more[1]
        else:
            looped += holds(eqn, name)
    return straight, looped


def unscaled_gradients(jaxpr: Any) -> tuple[int, int]:
    """How many leaves reach the optimizer without the loss scale in them, and how many in all.

    A leaf that depends on no input of the step (zeros, for a parameter without use) needs none.
    """
    missing = total = 0

    def run(jaxpr: Any, live: list[bool], seeded: list[bool]) -> tuple[list[bool], list[bool]]:
        nonlocal missing, total
        depends = {v for v, yes in zip(jaxpr.invars, live, strict=True) if yes}
        scaled = {v for v, yes in zip(jaxpr.invars, seeded, strict=True) if yes}

        def among(atoms: Any, found: set[Any]) -> list[bool]:
            return [not isinstance(a, core.Literal) and a in found for a in atoms]

        for eqn in jaxpr.eqns:
            ins, seeds = among(eqn.invars, depends), among(eqn.invars, scaled)
            if eqn.primitive in CALLS:
                body = compat.open_jaxpr(eqn.params[CALLS[eqn.primitive]])[0]
                outs, outs_scaled = run(body, ins, seeds)
            else:
                if is_mark(eqn, GRADIENT):
                    total += 1
                    missing += ins[0] and not seeds[0]
                outs = [any(ins)] * len(eqn.outvars)
                outs_scaled = [any(seeds) or holds(eqn, SEED)] * len(eqn.outvars)
            depends.update(v for v, yes in zip(eqn.outvars, outs, strict=True) if yes)
            scaled.update(v for v, yes in zip(eqn.outvars, outs_scaled, strict=True) if yes)
        return among(jaxpr.outvars, depends), among(jaxpr.outvars, scaled)

    run(jaxpr, [True] * len(jaxpr.invars), [False] * len(jaxpr.invars))
    return missing, total
