"""A traced step as one list of equations: calls are opened, loops and checkpoints are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax import compat, marks
from zerojax.collectives.changes import is_change


@dataclass(frozen=True, eq=False)
class Variable:
    """A value of a flat program; unlike jax's own, no two calls share one."""

    aval: Any


@dataclass(repr=False)
class Flat:
    """A program without calls, in the form of an open jaxpr.

    Attributes:
      invars, outvars: as in a jaxpr; results may be literals.
      eqns: equations in order.
      constvars, consts: arrays that the program brings along, and their variables.
    """

    invars: list[Any]
    eqns: list[Any] = field(default_factory=list)
    outvars: list[Any] = field(default_factory=list)
    constvars: list[Any] = field(default_factory=list)
    consts: list[Any] = field(default_factory=list)


def flatten(closed: Any) -> Flat:
    """Opens every call of a jaxpr that runs its body once on its own operands."""
    jaxpr, consts = compat.open_jaxpr(closed)
    flat = Flat([Variable(v.aval) for v in jaxpr.invars])
    flat.outvars = _open(flat, jaxpr, consts, flat.invars, None)
    return flat


def _open(
    flat: Flat, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], outer: Any
) -> list[Any]:
    """Appends the equations of a jaxpr on these arguments; its results."""
    env = dict(zip(jaxpr.invars, args, strict=True))
    for v, value in zip(jaxpr.constvars, consts, strict=True):
        env[v] = Variable(v.aval)
        flat.constvars.append(env[v])
        flat.consts.append(value)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        info = eqn.source_info
        if outer is not None:
            info = info.replace(name_stack=outer.name_stack + info.name_stack)
        values = [read(v) for v in eqn.invars]
        if _opens(eqn):
            inner, inner_consts = compat.open_jaxpr(eqn.params[marks.CALLS[eqn.primitive]])
            outs = _open(flat, inner, inner_consts, values, info)
        else:
            outs = [Variable(v.aval) for v in eqn.outvars]
            flat.eqns.append(eqn.replace(invars=values, outvars=outs, source_info=info))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _opens(eqn: Any) -> bool:
    """A checkpoint stays, for what it saves; so does the note of an update."""
    if eqn.primitive not in marks.CALLS or eqn.primitive is prims.remat_p:
        return False
    return not is_change(eqn)
