"""Kinds of values: how a value of a step depends on the rows of the batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from zerojax.accumulation.reductions import REDUCTIONS
from zerojax.xla.types import Atom


@dataclass(frozen=True, eq=False)
class Node:
    """A value reduced over rows, and the reductions that it is computed from.

    Attributes:
      key: The first result of the reduction over rows that computes the value; None where the value
        only combines its parents.
      parents: The nodes of the reduced values that this one is computed from.
    """

    key: Atom | None = None
    parents: tuple[Node, ...] = ()

    def roots(self) -> set[Atom]:
        """Returns the keys of all reductions over rows that the value is computed from."""
        roots, seen, left = set[Atom](), {id(self)}, [self]
        while left:
            node = left.pop()
            if node.key is not None:
                roots.add(node.key)
            for parent in node.parents:
                if id(parent) not in seen:
                    seen.add(id(parent))
                    left.append(parent)
        return roots


@dataclass(frozen=True)
class Problem:
    """The reason why a value cannot be computed from micro-batches.

    Attributes:
      why: What the equation does, a verb first: "combines rows of the batch with each other".
      where: The equation, as "primitive at file:line".
      shape: The shape of the equation's result if it has rows in several dimensions, or a dimension
        that does not grow in proportion to the rows; else None.
    """

    why: str
    where: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RowKind:
    """The dependence of a value on the rows of the batch.

    Attributes:
      name: One of

        - "fixed": does not depend on rows; the same in every micro-batch and in the global batch;
        - "rows": depends on them entry by entry along dimension ``dim``;
        - "row": depends on one row, within a loop over the rows;
        - "sum", "max", "min", "prod", "and", "or": that reduction over rows, so that the global
          batch's value is the same reduction of the micro-batches' values;
        - "global": computed from such reductions over the global batch;
        - "own": a value of the micro-batch only, such as its batch statistics;
        - "mixed": depends on rows in a way that micro-batches cannot reproduce, see ``problem``.
      dim, outer: For "rows", the dimension that holds the rows, and how many stretches of all rows
        it holds one after another; ``outer`` is None if the rows are interchangeable.
      adds: True for an "own" value of the backward pass if the micro-batches' values add up to a
        gradient.
      zero: True if all elements are known to be 0.
      index: "own" if each row holds its index within the batch, in ``column`` if the row holds
        other values too; "negative" if it holds whether that index is below 0; "number" if it
        holds another value computed from the index; else empty.
      counted: The equation that makes the indices of rows, as in :class:`Problem`; else empty.
      sizes: The numbers of rows from which a "fixed" value is computed.
      learned: True if the value depends on the state of the training.
      node: The reductions over rows that the value is computed from.
      home: The variable of the step (not of an inner program) that holds the value.
      guarded: The cases of the ``select_n`` that computed a "global" value.
      problem: The reason why the value is "mixed".
    """

    name: str
    dim: int = -1
    outer: int | None = None
    adds: bool = False
    zero: bool = False
    index: str = ""
    column: int = 0
    counted: str = ""
    sizes: frozenset[Atom] = frozenset()
    learned: bool = False
    node: Node | None = None
    home: Atom | None = None
    guarded: tuple[Atom, ...] = ()
    problem: Problem | None = None

    @property
    def rows(self) -> bool:
        """True if the value depends on the rows entry by entry."""
        return self.name == "rows"

    @property
    def reduced(self) -> bool:
        """True if the value is a reduction over rows."""
        return self.name in REDUCTIONS

    @property
    def needs_all_rows(self) -> bool:
        """True if the value is known only after all micro-batches."""
        return self.reduced or self.name == "global"

    @property
    def added(self) -> RowKind:
        """The kind of the value after all micro-batches."""
        return self.but(name="sum", adds=False) if self.adds else self

    def but(self, **changes: Any) -> RowKind:
        """Returns this kind with other values of some fields."""
        return dataclasses.replace(self, **changes)


Kinds = list[RowKind]
"""Kinds of an equation's operands, or of its results."""
FIXED = RowKind("fixed")
ZERO = RowKind("fixed", zero=True)


def mixed(why: str, where: str, shape: tuple[int, ...] | None = None) -> RowKind:
    """Returns the kind of a value that micro-batches cannot compute, see :class:`Problem`."""
    return RowKind("mixed", problem=Problem(why, where, shape), learned=True)


def together(kinds: Kinds) -> dict[str, Any]:
    """Returns the fields that a value inherits from its operands."""
    nodes = tuple({id(k.node): k.node for k in kinds if k.node is not None}.values())
    node = nodes[0] if len(nodes) == 1 else Node(parents=nodes) if nodes else None
    counted = next((k.counted for k in kinds if k.counted), "")
    return {"learned": any(k.learned for k in kinds), "node": node, "counted": counted}


def shared_layout(kinds: Kinds) -> RowKind | None:
    """Returns the layout of rows that all "rows" kinds among ``kinds`` share; None if they differ,
    or if there are none."""
    rows = [k for k in kinds if k.rows]
    dims, outers = {k.dim for k in rows}, {k.outer for k in rows} - {None}
    if len(dims) != 1 or len(outers) > 1:
        return None
    return RowKind(
        "rows",
        dim=dims.pop(),
        outer=next(iter(outers), None),
        index="number" if any(k.index for k in kinds) else "",
        **together(kinds),
    )


def join(one: RowKind, other: RowKind, where: str) -> RowKind:
    """Returns the kind of a value that has either of two kinds, such as the carry of a loop."""
    inherited = together([one, other])
    if one.name == "mixed":
        return one
    if other.name == "mixed":
        return other
    names = {one.name, other.name}
    if names == {"rows"}:
        layout = shared_layout([one, other])
        if layout is not None:
            return layout.but(zero=one.zero and other.zero)
    elif len(names) == 1:
        adds = one.adds and other.adds
        sizes = one.sizes | other.sizes
        zero = one.zero and other.zero
        return one.but(zero=zero, adds=adds, home=None, sizes=sizes, **inherited)
    elif "own" in names and names <= {"own", "fixed"}:
        adds = all(k.adds or k.zero for k in (one, other))
        return RowKind("own", adds=adds, **inherited)
    # Zeros are the sum of no rows.
    elif names == {"sum", "fixed"} and (one.zero or other.zero):
        return RowKind("sum", **inherited)
    elif names <= {"fixed", "global", *REDUCTIONS}:
        return RowKind("global", **inherited)
    return mixed("carries rows of the batch and other values in turn", where)
