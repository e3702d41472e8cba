"""A function of a batch, some rows at a time, with the numbers of the whole batch.

The function is traced twice: on the whole batch, and on a part of it. Where the shapes of a value
differ lies its dimension of rows. What works row by row is run part by part. Where the rows are
reduced (a sum, a maximum, a product that contracts them) the parts' results are combined, and what
follows runs once, from the trace of the whole batch: a mean divides by all rows, a masked mean by
the sum of all weights. A function in which rows meet in another way is not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax.evaluation.row_kinds import REDUCTIONS, EquationPair, Reduction, RowKind, TwoTraces
from zerojax.evaluation.row_rules import Sizes, Undivided
from zerojax.xla import jaxprs


class ByRows:
    """A function divided into what runs part by part and what runs once.

    Args:
      whole, part: Closed jaxprs of the function on a batch of ``sizes.whole`` rows and on one of
        ``sizes.part``.
      sizes: Both numbers of rows.
      batch: For each argument, whether its first dimension is the rows.
      opens: Whether a call is written out. Rows may not meet within others, which stay as they
        are: rematerialised, and with derivatives of their own.
      noise: Whether random numbers may have the rows in their shape, and so be others than those
        of the whole batch.

    Attributes:
      outs: The kind of each result.

    Raises:
      Undivided: The function cannot be divided; the message says why.
    """

    def __init__(
        self,
        whole: Any,
        part: Any,
        sizes: Sizes,
        batch: Sequence[bool],
        *,
        opens: Callable[[Any], bool] = lambda call: True,
        noise: bool = False,
    ) -> None:
        whole, part = jaxprs.without_calls(whole, opens), jaxprs.without_calls(part, opens)
        (self._jaxpr, self._consts), (other, _) = map(jaxprs.open_jaxpr, (whole, part))
        if self._jaxpr.effects:
            raise Undivided("it prints, or calls back into Python")
        self.sizes = sizes
        self._traced = TwoTraces(self._jaxpr, other, sizes, noise=noise)
        self._traced.classify([RowKind.ROWS if b else RowKind.FIXED for b in batch])
        self._batch = list(batch)
        self.outs = [self._traced.kind(v) for v in self._jaxpr.outvars]
        pairs = list(zip(self._jaxpr.outvars, self.outs, strict=True))
        self._by_rows = [v for v, kind in pairs if kind is RowKind.ROWS]
        self._once = [v for v, kind in pairs if kind is not RowKind.ROWS]
        if any(map(self._traced.rows, self._once)):
            raise Undivided("it returns an array of the batch's shape that is not made of its rows")
        self._reductions = self._used()

    def _used(self) -> list[EquationPair]:
        """The reductions that a result needs."""
        made = {v for pair in self._traced.reductions for v in pair.whole.outvars}
        needed = self._needed(self._once, made)
        read = {*jaxprs.variables((*self._once, *(v for eqn in needed for v in eqn.invars)))}
        if any(self._traced.kind(v) is RowKind.ROWS for v in read):
            raise Undivided("a loop over its rows makes a result that has none")
        return [p for p in self._traced.reductions if p.whole.outvars[0] in read]

    def zeros(self) -> list[jax.Array]:
        """The totals before the first part."""
        avals = [pair.whole.outvars[0].aval for pair in self._reductions]
        return [
            jnp.full(aval.shape, _reduction(pair).neutral(aval.dtype), _wide(aval.dtype))
            for pair, aval in zip(self._reductions, avals, strict=True)
        ]

    def add(self, totals: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """The totals of more parts together."""
        return [
            _reduction(pair).combine(a, b)
            for pair, a, b in zip(self._reductions, totals, others, strict=True)
        ]

    def part(self, args: Sequence[Any], counts: Any) -> tuple[list[Any], list[Any]]:
        """Runs the function on a part of the batch, as far as it goes by rows.

        Args:
          args: The function's arguments, with a part of the batch.
          counts: bool [rows of the part], whether a row is one of the batch's; None where all are.

        Returns:
          The reductions of these rows, and the results that go by rows, each with the rows in
          front.
        """
        targets = [*(v for p in self._reductions for v in p.whole.invars), *self._by_rows]
        env = self._run(targets, dict(zip(self._jaxpr.invars, args, strict=True)), part=True)
        totals = [self._reduced(pair, env, counts) for pair in self._reductions]
        return totals, [self._in_front(env[v], v) for v in self._by_rows]

    def _in_front(self, x: Any, v: Any) -> Any:
        d, each = self._traced.rows(v) or (0, 1)
        x = jnp.moveaxis(x, d, 0)
        return x.reshape(self.sizes.part, each, *x.shape[1:])

    def _reduced(self, pair: EquationPair, env: dict[Any, Any], counts: Any) -> Any:
        eqn, how = pair.whole, _reduction(pair)
        values = [jaxprs.read(v, env) for v in eqn.invars]
        if eqn.primitive.name == "scatter-add":
            values[0] = jnp.zeros_like(values[0])
        for i in how.operands if counts is not None else ():
            d, each = self._traced.rows(eqn.invars[i]) or (0, 1)
            shape = [1] * values[i].ndim
            shape[d] = -1
            mask = jnp.repeat(counts, each).reshape(shape)
            neutral = jnp.asarray(how.neutral(values[i].dtype), values[i].dtype)
            values[i] = jnp.where(mask, values[i], neutral)
        with jaxprs.context(eqn):
            (out,) = jaxprs.bind(pair.part, values)
        return out.astype(_wide(out.dtype))

    def finish(self, args: Sequence[Any], totals: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """The function's results.

        Args:
          args: The function's arguments; the batch is not read and may be None.
          totals: The totals of all parts.
          rows: The results that go by rows, of the whole batch, with the rows in front.
        """
        given = zip(self._jaxpr.invars, args, self._batch, strict=True)
        env = {v: x for v, x, batch in given if not batch}
        operands = [p.whole.invars[0] for p in self._reductions
                    if p.whole.primitive.name == "scatter-add"]  # fmt: skip
        env |= self._run(operands, env, part=False)
        for pair, total in zip(self._reductions, totals, strict=True):
            (out,) = pair.whole.outvars
            if pair.whole.primitive.name == "scatter-add":
                total = total + jaxprs.read(pair.whole.invars[0], env)
            env[out] = total.astype(out.aval.dtype)
        env = self._run(self._once, env, part=False)
        left = iter(rows)
        return [
            self._back(next(left), v) if kind is RowKind.ROWS else jaxprs.read(v, env)
            for v, kind in zip(self._jaxpr.outvars, self.outs, strict=True)
        ]

    def _back(self, x: Any, v: Any) -> Any:
        d, each = self._traced.rows(v) or (0, 1)
        return jnp.moveaxis(x.reshape(self.sizes.whole * each, *x.shape[2:]), 0, d)

    def _needed(self, targets: Sequence[Any], known: Any) -> list[Any]:
        """The equations that make the targets from what is known, in order."""
        wanted = {*jaxprs.variables(targets)} - set(known)
        found = []
        for pair in reversed(self._traced.pairs):
            if not wanted.isdisjoint(pair.whole.outvars):
                found.append(pair.whole)
                wanted |= {*jaxprs.variables(pair.whole.invars)} - set(known)
        return found[::-1]

    def _run(self, targets: Sequence[Any], env: dict[Any, Any], *, part: bool) -> dict[Any, Any]:
        env = dict(zip(self._jaxpr.constvars, self._consts, strict=True)) | env
        needed = {id(eqn) for eqn in self._needed(targets, env)}
        for pair in self._traced.pairs:
            eqn = pair.whole
            if id(eqn) not in needed:
                continue
            values: Sequence[Any] = [jaxprs.read(v, env) for v in eqn.invars]
            by_rows = part and RowKind.ROWS in map(self._traced.kind, eqn.outvars)
            if (run := pair.part if by_rows else eqn) is not None:
                with jaxprs.context(eqn):
                    values = jaxprs.bind(run, values)
            env.update(zip(eqn.outvars, values, strict=True))
        return env


def _reduction(pair: EquationPair) -> Reduction:
    return REDUCTIONS[pair.whole.primitive.name]


def _wide(dtype: Any) -> Any:
    """The dtype in which the results of parts are combined."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
