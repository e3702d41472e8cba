"""Decisions on the equations of one program, taken before the first of them runs on shards.

The step, a function that it calls, a branch, and one iteration of a loop are separate programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerojax.collectives import adjacent, in_place, residuals, wanted
from zerojax.collectives.gathering import Gatherer, Scope
from zerojax.collectives.shard import Shard
from zerojax.collectives.uses import used_unsharded
from zerojax.plan.layout import Spec
from zerojax.xla.types import Atom, Equation, Jaxpr


@dataclass(frozen=True, eq=False)
class ProgramDecisions:
    """The decisions on one program.

    Attributes:
      wants: By variable, the spec of the shard of each gradient, and of each value of which one is
        computed. Terms that are added up before they are reduced are left out.
      added_up: The gradients that are reduced once they are added up.
      leaving: The stacks that wait in host memory for the backward pass.
      in_place: By variable, the product of which each device computes its own shard of a gradient.
      used_unsharded: By ``id``, the shards among the arguments that a use other than a lookup needs
        unsharded.
    """

    wants: Mapping[Atom, Spec]
    added_up: set[Atom]
    leaving: set[Atom]
    in_place: Mapping[Atom, in_place.Product]
    used_unsharded: set[int]

    def places(self, eqn: Equation) -> bool:
        """Returns whether an equation has a result that is a gradient, or from which a gradient is
        computed, or that is sent to host memory."""
        return any(v in self.wants or v in self.leaving for v in eqn.outvars)


def decide(
    jaxpr: Jaxpr,
    args: Sequence[object],
    want: Sequence[Spec | None],
    gatherer: Gatherer,
    scope: Scope,
    smallest: int | None,
) -> ProgramDecisions:
    """Decides how a program runs on shards.

    Args:
      jaxpr: The program, an open jaxpr.
      args: Its arguments, some of them a :class:`zerojax.collectives.shard.Shard`.
      want: For each result the spec of its shard if it is a gradient; None for others. May be empty
        if no result is a gradient.
      gatherer: Gathers parameters and reduces gradients.
      scope: The scope in which the program runs.
      smallest: The fewest elements, on all devices together, of a block's residual that waits in
        host memory; None keeps all residuals on the devices.
    """
    mesh = gatherer.mesh
    wants = wanted.trace_back(jaxpr, want or [None] * len(jaxpr.outvars), mesh)
    products = in_place.find_gradients(jaxpr, wants, gatherer)
    sums = adjacent.sums(jaxpr, wants, mesh, of_layer=scope.of_layer, in_place=products.keys())
    wants = {v: spec for v, spec in wants.items() if v not in sums.added}
    shards = {v: x for v, x in zip(jaxpr.invars, args, strict=True) if isinstance(x, Shard)}
    needed = used_unsharded(jaxpr) if shards else frozenset()
    return ProgramDecisions(
        wants=wants,
        added_up=sums.reduced,
        leaving=set() if smallest is None else residuals.find(jaxpr, smallest),
        in_place=products,
        used_unsharded={id(x) for v, x in shards.items() if v in needed},
    )
