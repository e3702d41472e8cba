"""A function of a batch, some rows at a time, with the numbers of the whole batch.

The function is traced twice: on the whole batch, and on a part of it. Where the shapes of a value
differ lies its dimension of rows. What works row by row is run part by part. Where the rows are
reduced (a sum, a maximum, a product that contracts them) the parts' results are combined, and what
follows runs once, from the trace of the whole batch: a mean divides by all rows, a masked mean by
the sum of all weights. A function in which rows meet in another way is not divided.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zerojax import compat, marks
from zerojax.inline import flat
from zerojax.row_rules import RULES, SHAPES, Sizes, Undivided


class Kind(enum.Enum):
    """What a value is made from."""

    FIXED = "nothing of the batch's rows"
    ROWS = "rows, each from its own"
    TOTAL = "all rows"


class Reduction(NamedTuple):
    """How the results of parts become that of the whole.

    Attributes:
      combine: two results to one.
      neutral: what rows that do not count are replaced by, for a dtype.
      operands: positions of the operands whose rows are replaced.
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


class Pair(NamedTuple):
    """One equation as it stands in both traces; ``part`` is None where it is the identity there."""

    whole: Any
    part: Any


class Traced:
    """Both traces side by side.

    Args:
      whole, part: open jaxprs of one function.
      sizes: rows of both.
      inside: the loop or branch that they belong to, where nothing may be reduced.

    Raises:
      Undivided: they are not the same program.
    """

    def __init__(self, whole: Any, part: Any, sizes: Sizes, inside: str = "") -> None:
        self.whole, self.sizes, self._inside = whole, sizes, inside
        if len(whole.constvars) != len(part.constvars):
            raise Undivided("its constants depend on the number of rows")
        self._same: dict[Any, Any] = dict(zip(whole.constvars, part.constvars, strict=True))
        self._same |= zip(whole.invars, part.invars, strict=True)
        self.pairs = [*self._paired(whole, part)]
        self.kinds: dict[Any, Kind] = {}
        self.reductions: list[Pair] = []

    def _paired(self, whole: Any, part: Any) -> Iterable[Pair]:
        left = list(reversed(part.eqns))
        for eqn in whole.eqns:
            if left and self._match(eqn, left[-1]):
                other = left.pop()
                self._same.update(zip(eqn.outvars, other.outvars, strict=True))
                yield Pair(eqn, other)
            elif self._identity(eqn):
                self._same[eqn.outvars[0]] = self._same[eqn.invars[0]]
                yield Pair(eqn, None)
            else:
                raise Undivided(f"its {eqn.primitive.name} depends on the number of rows")
        if left:
            raise Undivided(f"its {left[-1].primitive.name} depends on the number of rows")

    def _match(self, eqn: Any, other: Any) -> bool:
        def same(a: Any, b: Any) -> bool:
            if isinstance(a, core.Literal) and isinstance(b, core.Literal):
                # Outside loops those of the whole batch are taken.
                return not self._inside or _equal(a.val, b.val)
            if isinstance(a, core.Literal) or isinstance(b, core.Literal):
                return False
            return self._same.get(a) is b

        return (
            eqn.primitive is other.primitive
            and len(eqn.invars) == len(other.invars)
            and len(eqn.outvars) == len(other.outvars)
            and all(map(same, eqn.invars, other.invars))
        )

    def _identity(self, eqn: Any) -> bool:
        """Something of one row spread over all rows, where the part has one row."""
        return (
            self.sizes.part == 1
            and eqn.primitive.name == "broadcast_in_dim"
            and not isinstance(eqn.invars[0], core.Literal)
            and eqn.params["broadcast_dimensions"] == tuple(range(len(eqn.params["shape"])))
            and len(eqn.invars[0].aval.shape) == len(eqn.params["shape"])
            and all(
                old == new or (old == 1 and new == self.sizes.whole)
                for old, new in zip(eqn.invars[0].aval.shape, eqn.params["shape"], strict=True)
            )
        )

    def rows(self, v: Any) -> tuple[int, int] | None:
        """The dimension of rows of a value and how many entries it has for each; None without.

        Raises:
          Undivided: it has several.
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

    def kind(self, v: Any) -> Kind:
        return Kind.FIXED if isinstance(v, core.Literal) else self.kinds[v]

    def classify(self, given: Sequence[Kind]) -> None:
        """Finds the kind of each value, given those of the arguments.

        Raises:
          Undivided: the rows meet otherwise than in a reduction.
        """
        for v in self.whole.constvars:
            if self.rows(v):
                raise Undivided("it has a constant with an entry for each row")
            self.kinds[v] = Kind.FIXED
        self.kinds.update(zip(self.whole.invars, given, strict=True))
        for pair in self.pairs:
            self.kinds.update(zip(pair.whole.outvars, self._kinds(pair), strict=True))

    def _kinds(self, pair: Pair) -> list[Kind]:
        """Of an equation's results."""
        eqn, name = pair.whole, pair.whole.primitive.name
        kinds = {self.kind(v) for v in eqn.invars}
        outs = [Kind.FIXED if self.rows(v) is None else Kind.ROWS for v in eqn.outvars]
        if Kind.ROWS not in {*outs, *kinds}:
            return [Kind.TOTAL if Kind.TOTAL in kinds else Kind.FIXED] * len(outs)
        if Kind.TOTAL in kinds:
            raise Undivided(f"its {name} takes rows together with a result of all rows")
        if pair.part is None:
            return outs
        if self._runs(pair):
            return outs
        self._check_params(pair)
        if Kind.FIXED not in outs:
            if name not in RULES or not RULES[name](
                eqn, [self.rows(v) for v in eqn.invars], [self.rows(v) for v in eqn.outvars]
            ):
                raise Undivided(f"its {name} brings rows together{self._inside}")
            return outs
        if not self._reduces(eqn) or self._inside:
            raise Undivided(f"its {name} brings rows together{self._inside}")
        self.reductions.append(pair)
        return [Kind.TOTAL]

    def _reduces(self, eqn: Any) -> bool:
        name = eqn.primitive.name
        if name not in REDUCTIONS:
            return False
        return name != "scatter-add" or (
            self.rows(eqn.invars[0]) is None and self.rows(eqn.invars[2]) is not None
        )

    def _check_params(self, pair: Pair) -> None:
        name = pair.whole.primitive.name
        for key, value in pair.whole.params.items():
            if key not in SHAPES.get(name, ()) and not _equal(value, pair.part.params.get(key)):
                raise Undivided(f"the {key} of its {name} depends on the number of rows")

    def _runs(self, pair: Pair) -> bool:
        """Looks into an equation that runs jaxprs; False for others.

        Raises:
          Undivided: the rows meet in them.
        """
        eqn, name, p = pair.whole, pair.whole.primitive.name, pair.whole.params
        other = pair.part.params
        if eqn.primitive in marks.CALLS:
            key = marks.CALLS[eqn.primitive]
            self._enter(p[key], other[key], eqn)
        elif name == "cond":
            for one, same in zip(p["branches"], other["branches"], strict=True):
                self._enter(one, same, eqn, skip=1)
        elif name == "while":
            a, b = p["cond_nconsts"], p["body_nconsts"]
            self._enter(p["cond_jaxpr"], other["cond_jaxpr"], eqn, drop=range(a, a + b))
            self._enter(p["body_jaxpr"], other["body_jaxpr"], eqn, skip=a)
        elif name == "scan":
            if p["length"] != other["length"]:
                raise Undivided("its scan runs over the rows")
            n = sum(compat.scan_counts(eqn))
            if any((self.rows(v) or (1,))[0] == 0 for v in eqn.invars[n:]):
                raise Undivided("its scan runs over the rows")
            self._enter(p["jaxpr"], other["jaxpr"], eqn)
        return name in _RUNS or eqn.primitive in marks.CALLS

    def _enter(
        self, whole: Any, part: Any, eqn: Any, skip: int = 0, drop: Iterable[int] = ()
    ) -> None:
        """Looks into a jaxpr that runs on an equation's operands, without the first ``skip`` and
        those in ``drop``."""
        name = eqn.primitive.name
        (whole, consts), (part, others) = compat.open_jaxpr(whole), compat.open_jaxpr(part)
        inner = Traced(whole, part, self.sizes, f" inside {name}")
        if not all(map(_equal, consts, others)):
            raise Undivided(f"the constants of its {name} depend on the number of rows")
        # What a loop carries is made of rows where it has their dimension, and may not be else.
        given = [Kind.ROWS if inner.rows(v) else Kind.FIXED for v in whole.invars]
        operands = [v for i, v in enumerate(eqn.invars) if i >= skip and i not in drop]
        if any(
            kind is Kind.FIXED and self.kind(v) is Kind.ROWS
            for v, kind in zip(operands, given, strict=True)
        ):
            raise Undivided(f"its {name} runs over the rows")
        inner.classify(given)


class ByRows:
    """A function divided into what runs part by part and what runs once.

    Args:
      whole, part: closed jaxprs of the function on a batch of ``sizes.whole`` rows and on one of
        ``sizes.part``.
      sizes: those.
      batch: for each argument, whether its first dimension is the rows.

    Attributes:
      outs: the kind of each result.

    Raises:
      Undivided: it cannot be divided; says why.
    """

    def __init__(self, whole: Any, part: Any, sizes: Sizes, batch: Sequence[bool]) -> None:
        whole, part = flat(whole), flat(part)
        (self._jaxpr, self._consts), (other, _) = map(compat.open_jaxpr, (whole, part))
        if self._jaxpr.effects:
            raise Undivided("it prints, or calls back into Python")
        self.sizes = sizes
        self._traced = Traced(self._jaxpr, other, sizes)
        self._traced.classify([Kind.ROWS if b else Kind.FIXED for b in batch])
        self._batch = list(batch)
        self.outs = [self._traced.kind(v) for v in self._jaxpr.outvars]
        if any(
            kind is not Kind.ROWS and self._traced.rows(v)
            for v, kind in zip(self._jaxpr.outvars, self.outs, strict=True)
        ):
            raise Undivided("it returns an array of the batch's shape that is not made of its rows")
        self._reductions = self._used()

    def _used(self) -> list[Pair]:
        """The reductions that a result needs."""
        made = {v for pair in self._traced.reductions for v in pair.whole.outvars}
        targets = self._totals_and_fixed()
        needed = self._needed(targets, made)
        read = {v for v in (*targets, *(v for eqn in needed for v in eqn.invars))
                if not isinstance(v, core.Literal)}  # fmt: skip
        if any(self._traced.kind(v) is Kind.ROWS for v in read):
            raise Undivided("a loop over its rows makes a result that has none")
        return [p for p in self._traced.reductions if p.whole.outvars[0] in read]

    def _totals_and_fixed(self) -> list[Any]:
        return [
            v
            for v, kind in zip(self._jaxpr.outvars, self.outs, strict=True)
            if kind is not Kind.ROWS
        ]

    def zeros(self) -> list[jax.Array]:
        """What the totals are before the first part."""
        found = []
        for pair in self._reductions:
            aval = pair.whole.outvars[0].aval
            neutral = _reduction(pair).neutral(aval.dtype)
            found.append(jnp.full(aval.shape, neutral, _wide(aval.dtype)))
        return found

    def add(self, totals: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The totals of more parts together."""
        return [
            _reduction(pair).combine(a, b)
            for pair, a, b in zip(self._reductions, totals, others, strict=True)
        ]

    def part(self, args: Sequence[Any], counts: Any) -> tuple[list[Any], list[Any]]:
        """Runs the function on a part of the batch, as far as it goes by rows.

        Args:
          args: those of the function, with a part of the batch.
          counts: bool [rows of the part], whether a row is one of the batch's; None where all are.

        Returns:
          What the reductions make of these rows, and the results that go by rows, each with the
          rows in front.
        """
        outs = [
            v for v, kind in zip(self._jaxpr.outvars, self.outs, strict=True) if kind is Kind.ROWS
        ]
        targets = [
            *(v for p in self._reductions for v in p.whole.invars),
            *outs,
        ]
        env = self._run(targets, dict(zip(self._jaxpr.invars, args, strict=True)), part=True)
        totals = [self._reduced(pair, env, counts) for pair in self._reductions]
        return totals, [self._in_front(env[v], v) for v in outs]

    def _in_front(self, x: Any, v: Any) -> Any:
        d, each = self._traced.rows(v) or (0, 1)
        x = jnp.moveaxis(x, d, 0)
        return x.reshape(self.sizes.part, each, *x.shape[1:])

    def _reduced(self, pair: Pair, env: dict[Any, Any], counts: Any) -> Any:
        eqn, how = pair.whole, _reduction(pair)
        values = [_read(v, env) for v in eqn.invars]
        if eqn.primitive.name == "scatter-add":
            values[0] = jnp.zeros_like(values[0])
        for i in how.operands if counts is not None else ():
            d, each = self._traced.rows(eqn.invars[i]) or (0, 1)
            shape = [1] * values[i].ndim
            shape[d] = -1
            mask = jnp.repeat(counts, each).reshape(shape)
            neutral = jnp.asarray(how.neutral(values[i].dtype), values[i].dtype)
            values[i] = jnp.where(mask, values[i], neutral)
        with eqn.ctx.manager:
            (out,) = marks.bind(pair.part, values)
        return out.astype(_wide(out.dtype))

    def finish(self, args: Sequence[Any], totals: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """The function's results.

        Args:
          args: those of the function; the batch is not read and may be None.
          totals: of all parts.
          rows: the results that go by rows, of the whole batch, with the rows in front.
        """
        env = {
            v: x
            for v, x, batch in zip(self._jaxpr.invars, args, self._batch, strict=True)
            if not batch
        }
        targets = self._totals_and_fixed()
        operands = [p.whole.invars[0] for p in self._reductions
                    if p.whole.primitive.name == "scatter-add"]  # fmt: skip
        env |= self._run(operands, env, part=False)
        for pair, total in zip(self._reductions, totals, strict=True):
            (out,) = pair.whole.outvars
            if pair.whole.primitive.name == "scatter-add":
                total = total + _read(pair.whole.invars[0], env)
            env[out] = total.astype(out.aval.dtype)
        env = self._run(targets, env, part=False)
        left = iter(rows)
        return [
            self._back(next(left), v) if kind is Kind.ROWS else _read(v, env)
            for v, kind in zip(self._jaxpr.outvars, self.outs, strict=True)
        ]

    def _back(self, x: Any, v: Any) -> Any:
        d, each = self._traced.rows(v) or (0, 1)
        return jnp.moveaxis(x.reshape(self.sizes.whole * each, *x.shape[2:]), 0, d)

    def _needed(self, targets: Sequence[Any], known: Any) -> list[Any]:
        """The equations that make the targets from what is known, in order."""
        wanted = {v for v in targets if not isinstance(v, core.Literal)} - set(known)
        found = []
        for pair in reversed(self._traced.pairs):
            if not wanted.isdisjoint(pair.whole.outvars):
                found.append(pair.whole)
                inputs = {v for v in pair.whole.invars if not isinstance(v, core.Literal)}
                wanted |= inputs - set(known)
        return found[::-1]

    def _run(self, targets: Sequence[Any], env: dict[Any, Any], *, part: bool) -> dict[Any, Any]:
        env = dict(zip(self._jaxpr.constvars, self._consts, strict=True)) | env
        needed = {id(eqn) for eqn in self._needed(targets, env)}
        for pair in self._traced.pairs:
            eqn = pair.whole
            if id(eqn) not in needed:
                continue
            values = [_read(v, env) for v in eqn.invars]
            if part and Kind.ROWS in map(self._traced.kind, eqn.outvars):
                if pair.part is None:
                    outs: Sequence[Any] = values
                else:
                    with eqn.ctx.manager:
                        outs = marks.bind(pair.part, values)
            else:
                with eqn.ctx.manager:
                    outs = marks.bind(eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return env


def _reduction(pair: Pair) -> Reduction:
    return REDUCTIONS[pair.whole.primitive.name]


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def _wide(dtype: Any) -> Any:
    """In which the results of parts are combined."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _equal(a: Any, b: Any) -> bool:
    """Whether two parameters, or constants, are the same; not a number is itself."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | np.generic | jax.Array | float):
        return bool(np.array_equal(a, b, equal_nan=np.issubdtype(np.asarray(a).dtype, np.inexact)))
    return bool(a == b)
