"""How a value of a step depends on the rows of the batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from zerojax.accumulation.reductions import REDUCTIONS


@dataclass(frozen=True, eq=False)
class Node:
    """A number made of rows, and what it was made from.

    Attributes:
      key: The path of the reduction over rows that makes the number; None where none does.
      parents: The numbers that this one is made from.
    """

    key: Any = None
    parents: tuple[Node, ...] = ()

    def roots(self) -> set[Any]:
        """Keys of all reductions over rows that the number is made from."""
        roots, seen, left = set(), {id(self)}, [self]
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
    """Why a value cannot be made from micro-batches.

    Attributes:
      why: What the equation does, a verb first: "combines rows of the batch with each other".
      where: "primitive at file:line".
      shape: Of an array that the equation makes with rows in several dimensions, or with a
        dimension that does not grow in proportion to the rows; else None.
    """

    why: str
    where: str
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class RowKind:
    """How a value depends on the rows of the batch.

    Attributes:
      name: One of

        - "fixed": not at all; the same number in every micro-batch and in the whole batch;
        - "rows": entry by entry of dimension ``dim``;
        - "row": on one row, within a loop over the rows;
        - "sum", "max", "min", "prod", "and", "or": that reduction over rows, so that the whole
          batch's is the same reduction of the micro-batches';
        - "whole": made from such numbers of the whole batch;
        - "own": a number of the micro-batch alone, such as its batch statistics;
        - "mixed": in a way that micro-batches cannot reproduce, see ``problem``.
      dim, outer: Of "rows", the dimension that holds them, and how many stretches of all rows it
        holds one behind the other; None where every row is alike.
      adds: Of "own", the backward pass's: the micro-batches' numbers add up to a gradient.
      zero: All elements are known to be 0.
      index: "own" where each row holds its number within the batch, in ``column`` if it holds
        others beside it; "negative" where it holds whether that is below 0; "number" where it
        holds something else made from it.
      learned: Depends on the state of the training.
      node: The reductions over rows that the value is made from.
      home: The variable of the step itself that holds the value.
      guarded: The two values between which a number of the whole batch chooses.
      problem: Of "mixed".
    """

    name: str
    dim: int = -1
    outer: int | None = None
    adds: bool = False
    zero: bool = False
    index: str = ""
    column: int = 0
    learned: bool = False
    node: Node | None = None
    home: Any = None
    guarded: tuple[Any, ...] = ()
    problem: Problem | None = None

    @property
    def rows(self) -> bool:
        return self.name == "rows"

    @property
    def reduced(self) -> bool:
        return self.name in REDUCTIONS

    @property
    def needs_whole(self) -> bool:
        """Whether the number is known once all micro-batches are done."""
        return self.reduced or self.name == "whole"

    @property
    def added(self) -> RowKind:
        """The kind of the value once the micro-batches are done."""
        return self.but(name="sum", adds=False) if self.adds else self

    def but(self, **changes: Any) -> RowKind:
        return dataclasses.replace(self, **changes)


Kinds = list[RowKind]
"""Those of an equation's operands, or of its results."""
FIXED = RowKind("fixed")
ZERO = RowKind("fixed", zero=True)


def mixed(why: str, where: str, shape: tuple[int, ...] | None = None) -> RowKind:
    return RowKind("mixed", problem=Problem(why, where, shape), learned=True)


def together(kinds: Kinds) -> dict[str, Any]:
    """What a value has of everything that made it: ``learned`` and ``node``."""
    nodes = tuple({id(k.node): k.node for k in kinds if k.node is not None}.values())
    node = nodes[0] if len(nodes) == 1 else Node(parents=nodes) if nodes else None
    return {"learned": any(k.learned for k in kinds), "node": node}


def agreed(kinds: Kinds) -> RowKind | None:
    """The one layout of rows that all "rows" kinds among these have; None if they differ."""
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
    """A value that is one or the other, as what a loop carries."""
    both = together([one, other])
    if one.name == "mixed":
        return one
    if other.name == "mixed":
        return other
    names = {one.name, other.name}
    if names == {"rows"}:
        layout = agreed([one, other])
        if layout is not None:
            return layout.but(zero=one.zero and other.zero)
    elif len(names) == 1:
        adds = one.adds and other.adds
        return one.but(zero=one.zero and other.zero, adds=adds, home=None, **both)
    elif "own" in names and names <= {"own", "fixed"}:
        adds = all(k.adds or k.zero for k in (one, other))
        return RowKind("own", adds=adds, **both)
    elif names == {"sum", "fixed"} and (one.zero or other.zero):
        return RowKind("sum", **both)
    elif names <= {"fixed", "whole", *REDUCTIONS}:
        return RowKind("whole", **both)
    return mixed("carries rows of the batch and other values in turn", where)
