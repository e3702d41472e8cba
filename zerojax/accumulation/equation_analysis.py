"""Kinds of the results of one equation, without a look into its inner programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from zerojax.accumulation.kinds import FIXED, Kinds, Node, RowKind, mixed, together
from zerojax.accumulation.row_rules import RULES
from zerojax.accumulation.sum_rules import reduced
from zerojax.accumulation.symbolic import Size, Symbolic, growing, grows
from zerojax.graph.primitives import ADDS, CALLBACKS, KERNELS, SCATTER_ADDS, ZERO_STAYS
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.types import Atom, Equation

MIXES = "combines rows of the batch with each other"
TAKES = "uses a number computed from all rows in each row"
LOOPS = "loops over the rows and carries numbers along"
BRINGS = "is an array of its own with as many rows as the batch"
LASTS = "runs for a number of steps that depends on rows of the batch"
BENDS = "uses a number computed from all rows in the rows' gradients"
SIZES = "uses the number of rows both of the micro-batch and of the global batch"
AFTER = "uses a number computed from all rows in each row, after the gradients"
_CREATES = "creates an array with as many rows as the batch"
_NUMBERS = "computes with row numbers, which a micro-batch does not know"
UNKNOWN = "is not known to keep rows separate"
_CALLS = "passes all rows to Python at once"
_INSIDE = "uses a number computed from all rows inside a loop"
CHOOSES = "chooses what to do with the rows by a number computed from all rows"

OF_ALL_ROWS = MIXES, TAKES, BENDS, AFTER
"""Causes that lie in the mathematics of a value, and not in how it is written."""

UNDIVIDED = "set gradient_accumulation_steps to 1."
_BY_ROW = "Run it for each row in jax.lax.map, or " + UNDIVIDED
REMEDIES = {
    MIXES: "Compute what needs no parameters (a permutation, a mixture of rows) before the step, "
    "as part of the batch, or " + UNDIVIDED,
    TAKES: "Use numbers of each row (LayerNorm instead of BatchNorm) or of the batch alone, or "
    + UNDIVIDED,
    BENDS: "Take the gradient of a sum or a mean over rows, and multiply it by the derivative of "
    "what follows (0.5 / jnp.sqrt(mean) for a root), or " + UNDIVIDED,
    AFTER: "Compute it with the parameters before the update, or " + UNDIVIDED,
    LOOPS: "Return a value for each row from the loop, or carry a sum that begins with zeros, or "
    + UNDIVIDED,
    BRINGS: "Make that array part of the batch.",
    _CREATES: "Make that array part of the batch.",
    _NUMBERS: "Make the row numbers part of the batch.",
    LASTS: "Loop a fixed number of times, or for each row in jax.lax.map, or " + UNDIVIDED,
    UNKNOWN: _BY_ROW,
    _CALLS: _BY_ROW,
    _INSIDE: "Compute it outside the loop, or " + UNDIVIDED,
    CHOOSES: "Choose by a value that does not depend on the batch, or " + UNDIVIDED,
}
"""By cause, what to write instead; for other causes, :data:`UNDIVIDED`."""

Place = tuple[Equation, ...]
"""An equation, after those whose inner programs hold it, outermost first."""


class Reduction(NamedTuple):
    """A reduction over rows.

    Attributes:
      place: The place of the equation.
      backward: Whether the equation belongs to the backward pass.
      in_loop: Whether the equation is a loop over the rows that carries the sum.
    """

    place: Place
    backward: bool
    in_loop: bool = False


@dataclass(frozen=True)
class Conflict:
    """A value reduced over all rows that an equation combines with rows again.

    Attributes:
      kind: The kind of the reduced value.
      backward: True if the equation belongs to the backward pass.
      place: The place of the equation.
    """

    kind: RowKind
    backward: bool
    place: Place


@dataclass
class Choices:
    """Decisions about the values of a step that are reduced over all rows.

    Attributes:
      first: Variables that depend only on the batch, and are computed before the micro-batches.
      own: The first results of the reductions that each micro-batch computes over its own rows.
    """

    first: set[Atom] = field(default_factory=set)
    own: set[Atom] = field(default_factory=set)


class EquationAnalysis:
    """Rules from the kinds of operands to the kinds of results, and their findings on the way.

    Args:
      symbolic, rows, choices, hopeful, neighbours: See
        :class:`zerojax.accumulation.analysis.Analysis`.

    Attributes:
      conflicts: The conflicts, in the order of the equations.
      drawn: Places of equations that draw noise in the batch's shape.
      kernels: Places of kernels that take rows. Kernels are assumed to treat each row separately,
        or to sum over rows.
      owners: Places where the forward pass computes a micro-batch's own values.
      reductions: The reductions over rows, by their first result.
    """

    def __init__(
        self, symbolic: Symbolic, rows: int, choices: Choices, *, hopeful: bool, neighbours: bool
    ) -> None:
        self.symbolic, self.choices, self.hopeful = symbolic, choices, hopeful
        self._rows, self._neighbours = rows, neighbours
        self.conflicts: list[Conflict] = []
        self.drawn: list[str] = []
        self.owners: list[str] = []
        self.kernels: list[str] = []
        self.reductions: dict[Atom, Reduction] = {}

    def of_fixed(self, eqn: Equation, kinds: Kinds) -> Kinds:
        """Returns the kinds of an equation's results if no operand has rows. The equation may
        create arrays of the batch's size."""
        inherited = together(kinds)
        if not grows(eqn):
            zero = eqn.primitive.name in ZERO_STAYS and bool(kinds)
            product = eqn.primitive.name == "mul"
            zero = zero and (any if product else all)(k.zero for k in kinds)
            return [RowKind("fixed", zero=zero, **inherited)] * len(eqn.outvars)
        outs = []
        for v in eqn.outvars:
            dims = growing(v)
            name = eqn.primitive.name
            if not dims:
                outs.append(RowKind("fixed", **inherited))
            elif (shape := self._misshapen(v)) is not None:
                outs.append(mixed(MIXES, where(eqn), shape))
            elif name.startswith(("random_", "threefry", "rng_")):
                self.drawn.append(where(eqn))
                outs.append(RowKind("rows", dim=dims[0], **inherited))
            elif name == "iota":
                along = jaxprs.param(eqn, "dimension") == dims[0]
                own = along and self.symbolic.rows.per_row(v.aval.shape[dims[0]]) == 1
                index = "own" if own else "number" if along else ""
                outer = 1 if along else None
                inherited["counted"] = where(eqn)
                outs.append(RowKind("rows", dim=dims[0], outer=outer, index=index, **inherited))
            elif name == "broadcast_in_dim":
                outs.append(
                    RowKind("rows", dim=dims[0], zero=kinds[0].zero, learned=inherited["learned"])
                )
            else:
                outs.append(mixed(_CREATES, where(eqn)))
        return outs

    def of_rows(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of an equation's results if its operands or results have rows."""
        eqn = place[-1]
        name = eqn.primitive.name
        # A barrier passes each operand on, whatever kinds the others have.
        if name == "optimization_barrier":
            return [k.but(home=None) for k in kinds]
        adds_up = name in SCATTER_ADDS and kinds[0].name == "sum"
        if numbers := [k for k in kinds[adds_up:] if k.needs_all_rows]:
            if self.hopeful:
                self.conflicts += [Conflict(k, backward, place) for k in numbers]
                kinds = [
                    RowKind("own", **together([k]))
                    if k.needs_all_rows and not (adds_up and i == 0)
                    else k
                    for i, k in enumerate(kinds)
                ]
            else:
                roots = {root for k in numbers if k.node is not None for root in k.node.roots()}
                after = any(self.is_backward(root) for root in roots)
                return refused(eqn, BENDS if backward else AFTER if after else TAKES)
        if name in KERNELS:
            return self._opaque(eqn, kinds)
        if not any(k.rows for k in kinds):
            return self.of_fixed(eqn, kinds)
        if name in CALLBACKS:
            return refused(eqn, _CALLS)
        rule = RULES.get(name)
        out = None if rule is None else rule(eqn, kinds)
        if out is None:
            shape = next(filter(None, map(self._misshapen, eqn.outvars)), None)
            why, at = UNKNOWN if rule is None else MIXES, where(eqn)
            # The rows alone would pass: their numbers are what the rule refuses.
            if rule is not None and rule(eqn, [k.but(index="") for k in kinds]) is not None:
                why, at = _NUMBERS, together(kinds)["counted"]
            return [mixed(why, at, shape)] * len(eqn.outvars)
        if name.startswith(("random_", "threefry")) and out.index:
            self.drawn.append(where(eqn))
            out = out.but(index="")
        if out.reduced:
            key = eqn.outvars[0]
            self.reductions[key] = Reduction(place, backward)
            if key in self.choices.own:
                if not backward:
                    self.owners.append(where(eqn))
                adds = backward and out.name == "sum"
                own = RowKind("own", adds=adds, learned=out.learned, node=Node(key))
                return [own] * len(eqn.outvars)
            before = tuple(k.node for k in kinds if k.reduced and k.node is not None)
            return [out.but(node=Node(key, before))] * len(eqn.outvars)
        return self._checked(eqn, out.but(home=None, guarded=(), node=None))

    def is_backward(self, reduction: Atom) -> bool:
        """Returns whether the backward pass computes a reduction."""
        return reduction in self.reductions and self.reductions[reduction].backward

    def _checked(self, eqn: Equation, out: RowKind) -> Kinds:
        """Returns the layout ``out`` for each result whose shape agrees with it, "mixed" for the
        others."""
        outs = []
        for v in eqn.outvars:
            shape = self._misshapen(v)
            same = out.rows and shape is None and growing(v) == [out.dim]
            same = same and self._divides(out, v.aval.shape[out.dim])
            outs.append(out if same else mixed(MIXES, where(eqn), shape))
        return outs

    def _divides(self, rows: RowKind, size: Size) -> bool:
        """Returns whether all stretches of rows in a dimension of this size are equally long."""
        outer, each = rows.outer or 1, self.symbolic.rows.per_row(size)
        if each is None or (not self._neighbours and each % outer):
            return False
        return self.symbolic.rows.at(size, self._rows) % outer == 0

    def _misshapen(self, v: Atom) -> tuple[int, ...] | None:
        """Returns the shape of a variable that has rows in several dimensions, or a dimension that
        does not grow in proportion to the rows; None for other variables."""
        dims = growing(v)
        if len(dims) < 2 and all(self._divides(RowKind("rows"), v.aval.shape[d]) for d in dims):
            return None
        return self.symbolic.global_shape(v)

    def _opaque(self, eqn: Equation, kinds: Kinds) -> Kinds:
        """Returns the kinds of a kernel's results: rows if their shapes grow, else sums over
        rows."""
        outs, inherited = [], together(kinds)
        outers = {k.outer for k in kinds if k.rows} - {None, 1}
        if outers or any(k.index for k in kinds):
            return refused(eqn, MIXES)
        self.kernels.append(where(eqn))
        for v in eqn.outvars:
            dims, shape = growing(v), self._misshapen(v)
            if shape is not None:
                outs.append(mixed(MIXES, where(eqn), shape))
            else:
                rows = RowKind("rows", dim=dims[0], outer=1, **inherited) if dims else None
                outs.append(rows or RowKind("sum", **inherited))
        return outs

    def of_numbers(self, kinds: Kinds, place: Place, backward: bool) -> Kinds:
        """Returns the kinds of the results of an equation without rows, on reductions over rows or
        values computed from them. Inside a loop that is a conflict, as with rows."""
        eqn = place[-1]
        result = RowKind("global", **together(kinds))
        if any(k.name == "own" for k in kinds):
            if eqn.primitive.name == "select_n" and kinds[0].needs_all_rows:
                return [result.but(guarded=tuple(eqn.invars[1:]))]
            # A micro-batch's share of a sum, times its own value, is its share of another sum.
            if all(k.name in ("own", "fixed", "sum") for k in kinds) and is_sum(eqn, kinds):
                return [RowKind("sum", **together(kinds))] * len(eqn.outvars)
            return refused(eqn, "combines a number of a micro-batch with one of the global batch")
        if eqn.primitive.name == "optimization_barrier":
            return [k.but(home=None) for k in kinds]
        if not any(k.name == "global" for k in kinds):
            total = reduced(eqn, kinds)
            if total is not None:
                return [total] * len(eqn.outvars)
        if len(place) > 1:
            if not self.hopeful:
                return refused(eqn, _INSIDE)
            self.conflicts += [Conflict(k, backward, place) for k in kinds if k.needs_all_rows]
        if eqn.primitive.name == "select_n":
            result = result.but(guarded=tuple(eqn.invars[1:]))
        return [result] * len(eqn.outvars)

    def of_row(self, eqn: Equation, kinds: Kinds) -> Kinds:
        """Returns the kinds of an equation's results on one row, within a loop over the rows."""
        inherited = together(kinds)
        if not any(k.needs_all_rows for k in kinds):
            return [RowKind("row", learned=inherited["learned"])] * len(eqn.outvars)
        adds = eqn.primitive.name in ADDS | SCATTER_ADDS
        numbers = [k for k in kinds if k.needs_all_rows]
        if adds and [k.name for k in numbers] == ["sum"]:
            return [numbers[0].but(home=None, **inherited)]
        return refused(eqn, LOOPS)


def refused(eqn: Equation, why: str) -> Kinds:
    """Returns the kinds of results that micro-batches cannot reproduce because of ``eqn``."""
    return [mixed(why, where(eqn))] * len(eqn.outvars)


def is_sum(eqn: Equation, kinds: Kinds) -> bool:
    """Returns whether the result is a sum over micro-batches, to which each may contribute with its
    own values."""
    given = [FIXED if k.name == "own" and not k.adds else k.added for k in kinds]
    if not any(k.name == "sum" for k in given):
        return False
    total = reduced(eqn, given)
    return total is not None and total.name == "sum"
