"""What each value of a function is made from: nothing of the batch, its own row, or all rows.

The function is traced on the whole batch and on a part of it. Where the shapes of a value differ
lies its dimension of rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zerojax.evaluation.row_rules import SHAPES, Sizes, Undivided, goes_by_rows
from zerojax.xla import jaxprs


class RowKind(enum.Enum):
    """What a value is made from."""

    FIXED = "nothing of the batch's rows"
    ROWS = "rows, each from its own"
    TOTAL = "all rows"


class Reduction(NamedTuple):
    """How the results of parts become that of the whole.

    Attributes:
      combine: Makes one result of two.
      neutral: The value that stands for rows that do not count, for a dtype.
      operands: Positions of the operands whose rows are replaced.
    """

    combine: Callable[[Any, Any], Any]
    neutral: Callable[[Any], Any]
    operands: tuple[int, ...] = (0,)


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max


REDUCTIONS: Mapping[str, Reduction] = {
    "reduce_sum": Reduction(jnp.add, lambda _: 0),
    "reduce_max": Reduction(jnp.maximum, _lowest),
    "reduce_min": Reduction(jnp.minimum, _highest),
    "reduce_prod": Reduction(jnp.multiply, lambda _: 1),
    "reduce_and": Reduction(jnp.bitwise_and, lambda dtype: np.array(-1).astype(dtype)),
    "reduce_or": Reduction(jnp.bitwise_or, lambda _: 0),
    "dot_general": Reduction(jnp.add, lambda _: 0, (0, 1)),
    "scatter-add": Reduction(jnp.add, lambda _: 0, (2,)),
}
_RUNS = frozenset(["scan", "while", "cond", "optimization_barrier"])


class EquationPair(NamedTuple):
    """One equation in both traces; ``part`` is None where the equation is an identity there."""

    whole: Any
    part: Any


class TwoTraces:
    """Both traces side by side.

    Args:
      whole, part: Open jaxprs of one function.
      sizes: Rows of both.
      inside: The loop or branch that they belong to, where nothing may be reduced.
      noise: Whether random numbers may have the rows in their shape.

    Raises:
      Undivided: The traces are not the same program.
    """

    def __init__(
        self, whole: Any, part: Any, sizes: Sizes, inside: str = "", noise: bool = False
    ) -> None:
        self.whole, self.sizes, self._inside, self._noise = whole, sizes, inside, noise
        if len(whole.constvars) != len(part.constvars):
            raise Undivided("its constants depend on the number of rows")
        self._same: dict[Any, Any] = dict(zip(whole.constvars, part.constvars, strict=True))
        self._same |= zip(whole.invars, part.invars, strict=True)
        self.pairs = [*self._paired(whole, part)]
        self.kinds: dict[Any, RowKind] = {}
        self.reductions: list[EquationPair] = []

    def _paired(self, whole: Any, part: Any) -> Iterable[EquationPair]:
        left = list(reversed(part.eqns))
        for eqn in whole.eqns:
            if left and self._match(eqn, left[-1]):
                other = left.pop()
                self._same.update(zip(eqn.outvars, other.outvars, strict=True))
                yield EquationPair(eqn, other)
            elif self._identity(eqn):
                self._same[eqn.outvars[0]] = self._same[eqn.invars[0]]
                yield EquationPair(eqn, None)
            else:
                raise Undivided(f"its {eqn.primitive.name} depends on the number of rows")
        if left:
            raise Undivided(f"its {left[-1].primitive.name} depends on the number of rows")

    def _match(self, eqn: Any, other: Any) -> bool:
        def same(a: Any, b: Any) -> bool:
            literals = [isinstance(x, core.Literal) for x in (a, b)]
            if all(literals):  # outside loops those of the whole batch are taken
                return not self._inside or _equal(a.val, b.val)
            return not any(literals) and self._same.get(a) is b

        return (
            eqn.primitive is other.primitive
            and len(eqn.invars) == len(other.invars)
            and len(eqn.outvars) == len(other.outvars)
            and all(map(same, eqn.invars, other.invars))
        )

    def _identity(self, eqn: Any) -> bool:
        """Something of one row spread over all rows, where the part has one row."""
        if self.sizes.part != 1 or eqn.primitive.name != "broadcast_in_dim":
            return False
        if isinstance(eqn.invars[0], core.Literal):
            return False
        old, new = eqn.invars[0].aval.shape, jaxprs.param(eqn, "shape")
        in_place = jaxprs.param(eqn, "broadcast_dimensions") == tuple(range(len(new)))
        return in_place and all(
            a == b or (a == 1 and b == self.sizes.whole) for a, b in zip(old, new, strict=True)
        )

    def rows(self, v: Any) -> tuple[int, int] | None:
        """The dimension of rows of a value, and its entries for each row; None without such.

        Raises:
          Undivided: The value has several dimensions of rows.
        """
        if isinstance(v, core.Literal) or v not in self._same:
            return None
        whole, part = v.aval.shape, self._same[v].aval.shape
        if whole == part:
            return None
        if len(whole) != len(part):
            raise Undivided("its shapes depend on the number of rows")
        found = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
        d = found[0]
        each, over = divmod(whole[d], self.sizes.whole)
        if len(found) > 1 or over or part[d] != each * self.sizes.part:
            raise Undivided(f"it makes an array of shape {whole} of {self.sizes.whole} rows")
        return d, each

    def kind(self, v: Any) -> RowKind:
        return RowKind.FIXED if isinstance(v, core.Literal) else self.kinds[v]

    def classify(self, given: Sequence[RowKind]) -> None:
        """Finds the kind of each value, given those of the arguments.

        Raises:
          Undivided: Rows meet otherwise than in a reduction.
        """
        for v in self.whole.constvars:
            if self.rows(v):
                raise Undivided("it has a constant with an entry for each row")
            self.kinds[v] = RowKind.FIXED
        self.kinds.update(zip(self.whole.invars, given, strict=True))
        for pair in self.pairs:
            self.kinds.update(zip(pair.whole.outvars, self._kinds(pair), strict=True))

    def _kinds(self, pair: EquationPair) -> list[RowKind]:
        """The kinds of an equation's results."""
        eqn, name = pair.whole, pair.whole.primitive.name
        kinds = {self.kind(v) for v in eqn.invars}
        outs = [RowKind.FIXED if self.rows(v) is None else RowKind.ROWS for v in eqn.outvars]
        if RowKind.ROWS not in {*outs, *kinds}:
            return [RowKind.TOTAL if RowKind.TOTAL in kinds else RowKind.FIXED] * len(outs)
        if RowKind.TOTAL in kinds:
            raise Undivided(f"its {name} takes rows together with a result of all rows")
        if pair.part is None or self._runs(pair):
            return outs
        if self._noise and name == "random_bits":
            return outs
        self._check_params(pair)
        if RowKind.FIXED in outs:
            apart = self._reduces(eqn) and not self._inside
        else:
            apart = goes_by_rows(eqn, [*map(self.rows, eqn.invars)], [*map(self.rows, eqn.outvars)])
        if not apart:
            raise Undivided(f"its {name} brings rows together{self._inside}")
        if RowKind.FIXED not in outs:
            return outs
        self.reductions.append(pair)
        return [RowKind.TOTAL]

    def _reduces(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name not in REDUCTIONS:
            return False
        return name != "scatter-add" or (
            self.rows(eqn.invars[0]) is None and self.rows(eqn.invars[2]) is not None
        )

    def _check_params(self, pair: EquationPair) -> None:
        name = pair.whole.primitive.name
        for key, value in pair.whole.params.items():
            if key not in SHAPES.get(name, ()) and not _equal(value, pair.part.params.get(key)):
                raise Undivided(f"the {key} of its {name} depends on the number of rows")

    def _runs(self, pair: EquationPair) -> bool:
        """Looks into an equation that runs jaxprs; False for others.

        Raises:
          Undivided: Rows meet in them.
        """
        eqn, part, name = pair.whole, pair.part, pair.whole.primitive.name
        if eqn.primitive in jaxprs.CALLS:
            self._enter(jaxprs.called(eqn), jaxprs.called(part), eqn)
        elif name == "cond":
            both = (jaxprs.param(e, "branches") for e in (eqn, part))
            for one, same in zip(*both, strict=True):
                self._enter(one, same, eqn, skip=1)
        elif name == "while":
            loop, other = jaxprs.while_parts(eqn), jaxprs.while_parts(part)
            a, b = loop.cond_consts, loop.body_consts
            self._enter(loop.cond, other.cond, eqn, drop=range(a, a + b))
            self._enter(loop.body, other.body, eqn, skip=a)
        elif name == "scan":
            if jaxprs.param(eqn, "length") != jaxprs.param(part, "length"):
                raise Undivided("its scan runs over the rows")
            n = sum(jaxprs.scan_counts(eqn))
            if any((self.rows(v) or (1,))[0] == 0 for v in eqn.invars[n:]):
                raise Undivided("its scan runs over the rows")
            self._enter(jaxprs.param(eqn, "jaxpr"), jaxprs.param(part, "jaxpr"), eqn)
        return name in _RUNS or eqn.primitive in jaxprs.CALLS

    def _enter(
        self, whole: Any, part: Any, eqn: Any, skip: int = 0, drop: Iterable[int] = ()
    ) -> None:
        """Looks into a jaxpr that runs on an equation's operands, without the first ``skip`` and
        those in ``drop``."""
        name = eqn.primitive.name
        (whole, consts), (part, others) = jaxprs.open_jaxpr(whole), jaxprs.open_jaxpr(part)
        inner = TwoTraces(whole, part, self.sizes, f" inside {name}", self._noise)
        if not all(map(_equal, consts, others)):
            raise Undivided(f"the constants of its {name} depend on the number of rows")
        # A carried value is made of rows where it has their dimension, and nowhere else.
        given = [RowKind.ROWS if inner.rows(v) else RowKind.FIXED for v in whole.invars]
        operands = [v for i, v in enumerate(eqn.invars) if i >= skip and i not in drop]
        if any(
            kind is RowKind.FIXED and self.kind(v) is RowKind.ROWS
            for v, kind in zip(operands, given, strict=True)
        ):
            raise Undivided(f"its {name} runs over the rows")
        inner.classify(given)


def _equal(a: Any, b: Any) -> bool:
    """Whether two parameters, or constants, are the same; NaN is the same as NaN."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | np.generic | jax.Array | float):
        return bool(np.array_equal(a, b, equal_nan=np.issubdtype(np.asarray(a).dtype, np.inexact)))
    return bool(a == b)
