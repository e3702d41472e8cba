"""Reading jaxprs: which equations they have, and which of those gather or scatter."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives as prims
from jax.sharding import NamedSharding

from zerojax.plan import layout

Spec = layout.Spec


class Move(NamedTuple):
    """A collective in a jaxpr.

    Attributes:
      inside: primitives of the equations around it, outermost first.
      shape, dtype: of the whole array.
    """

    inside: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


def equations(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every equation, those of loops and calls too, with the primitives around it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield inside, eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner, (*inside, eqn.primitive.name))


def primitives(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for _, eqn in equations(jaxpr)]


def gathers(jaxpr: Any, axis: str = "data") -> list[Move]:
    """Where an array that lies cut over ``axis`` is constrained to be unsharded."""
    return _moves(jaxpr, axis, cut_first=True)


def scatters(jaxpr: Any, axis: str = "data") -> list[Move]:
    """Where an unsharded array is constrained to lie cut over ``axis``."""
    return _moves(jaxpr, axis, cut_first=False)


def _moves(jaxpr: Any, axis: str, *, cut_first: bool) -> list[Move]:
    cut: dict[Any, bool] = {}
    found = []
    for inside, eqn in equations(jaxpr):
        if eqn.primitive is not prims.sharding_constraint_p:
            continue
        (source,), (out,) = eqn.invars, eqn.outvars
        cut[out] = _names(eqn.params["sharding"], axis)
        if cut.get(source) is cut_first and cut[out] is not cut_first:
            found.append(Move(inside, out.aval.shape, str(out.aval.dtype)))
    return found


def _names(sharding: NamedSharding, axis: str) -> bool:
    return any(axis in layout.axes(entry) for entry in sharding.spec)


def the(jaxpr: Any, name: str) -> Any:
    """The one equation of that primitive at the top of a jaxpr."""
    (eqn,) = [e for e in getattr(jaxpr, "jaxpr", jaxpr).eqns if e.primitive.name == name]
    return eqn


def abstract(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
