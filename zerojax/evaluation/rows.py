"""A function of a batch that runs on some rows at a time, with the results of the full batch.

The function is analysed and split like a step under accumulation: equations that work row by row
run part by part, the reductions of the parts over their rows are combined, and the remaining
equations run once, from the trace on the full batch. A part may have any of the rows. A function
that combines rows in another way is not divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as prims
from jax.tree_util import PyTreeDef
from jax.typing import DTypeLike

from zerojax.accumulation.analysis import Analysis
from zerojax.accumulation.equation_analysis import Choices, Reduction
from zerojax.accumulation.flat import flatten
from zerojax.accumulation.kinds import FIXED, RowKind
from zerojax.accumulation.reductions import REDUCTIONS
from zerojax.accumulation.split import ByPart, split
from zerojax.accumulation.symbolic import Symbolic, TracedRows, UnevenError
from zerojax.accumulation.traces import RULES, symbolic_program
from zerojax.evaluation.masks import Mask
from zerojax.evaluation.undivided import RUNS_OVER, TOGETHER, Undivided
from zerojax.graph.cache import cached_by_jaxpr
from zerojax.graph.def_use import graph_of
from zerojax.xla import jaxprs
from zerojax.xla.lines import where
from zerojax.xla.types import AnyJaxpr, Atom, Equation


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function as a jaxpr of arrays, some of them those of the batch.

    Attributes:
      closed: The jaxpr.
      batch: For each argument, whether its first dimension holds the rows.
      out: ``jax.tree.structure`` of the results.
    """

    closed: AnyJaxpr
    batch: list[bool]
    out: PyTreeDef


class ByRows:
    """A function divided into what runs part by part and what runs once.

    Args:
      full: The function on a batch of ``rows.traced[0]`` rows.
      other: The function on ``rows.traced[1]`` rows.
      rows: The numbers of rows.
      padded: Whether a part may have rows that do not count.
      differentiated: Whether the function is differentiated afterwards; if so, checkpoints and
        functions with custom derivatives are kept.
      noise: Whether random numbers may have the rows in their shape, so that they differ from those
        of the full batch.

    Raises:
      Undivided: The function cannot be divided; the message says why.
    """

    def __init__(
        self,
        full: TracedFunction,
        other: TracedFunction,
        rows: TracedRows,
        *,
        padded: bool,
        differentiated: bool = False,
        noise: bool = False,
    ) -> None:
        if jaxprs.open_jaxpr(full.closed)[0].effects:
            raise Undivided("it prints, or calls back into Python")
        if full.out != other.out:
            raise Undivided("its results depend on the number of rows")
        batch = [i for i, has_rows in enumerate(full.batch) if has_rows]
        others = [i for i, has_rows in enumerate(full.batch) if not has_rows]
        keeps = (prims.remat_p, *RULES) if differentiated else ()
        one, two = (flatten(x.closed, others, batch, keeps) for x in (full, other))
        self._given = [RowKind("rows", dim=0, outer=1) if x else FIXED for x in full.batch]
        self._padded, self._noise = padded, noise
        try:
            self._symbolic = symbolic_program(one, two, rows)
        except UnevenError as e:
            raise Undivided.uneven(e) from e

    @cached_by_jaxpr
    def __call__(self, rows: int) -> PartPrograms:
        """Returns the function's programs for parts of some rows.

        Raises:
          Undivided: The function cannot be divided.
        """
        try:
            return PartPrograms(self._symbolic, self._given, rows, self._padded, self._noise)
        except UnevenError as e:
            raise Undivided.uneven(e) from e


class PartPrograms:
    """The programs of a divided function for parts of some rows.

    Args:
      symbolic: The function.
      given: The kinds of its arguments.
      rows: Rows of a part.
      padded, noise: See :class:`ByRows`.

    Attributes:
      stacked: Positions of the results that hold rows, computed part by part; the other results are
        values of the full batch.
    """

    def __init__(
        self, symbolic: Symbolic, given: Sequence[RowKind], rows: int, padded: bool, noise: bool
    ) -> None:
        self._symbolic, self._rows = symbolic, rows
        # A part has some rows of each device, which are not adjacent in the batch.
        self._analysis = Analysis(symbolic, given, rows, Choices(), neighbours=False)
        # Only shapes show what a kernel does with the rows.
        for place in (*self._analysis.kernels, *(() if noise else self._analysis.drawn)):
            raise Undivided.at(place, TOGETHER)
        kinds = [self._kind(v) for v in symbolic.flat.outvars]
        by_part = [ByPart(i, kind) for i, kind in enumerate(kinds) if kind.rows]
        self._split = split(symbolic, self._analysis, rows, (), by_part, {}, {})
        self.stacked: list[int] = [x.position for x in by_part]
        self._masks = self._masked() if padded else {}

    def _kind(self, v: Atom) -> RowKind:
        """Returns the kind of a result.

        Raises:
          Undivided: PartPrograms cannot compute the result.
        """
        kind = self._analysis.kind(v)
        if kind.problem is not None:
            raise Undivided.because(kind.problem, self._symbolic.global_rows)
        if kind.index or (kind.rows and kind.outer not in (1, None)):
            raise Undivided.at(where(graph_of(self._symbolic.flat).producer(v)), TOGETHER)
        return kind

    def _masked(self) -> dict[Atom, Mask]:
        """Maps the result of each reduction of a part to the mask for rows that do not count.

        Raises:
          Undivided: Rows are reduced within a loop or a call, where they cannot be masked.
        """
        numbers = (self._analysis.kind(x.variable) for x in self._split.crossing)
        keys = {key for x in numbers if x.node is not None for key in x.node.roots()}
        found = self._analysis.reductions.items()
        return {key: self._mask(reduction) for key, reduction in found if key in keys}

    def _mask(self, reduction: Reduction) -> Mask:
        eqn, *inside = reduction.place
        if reduction.in_loop:
            raise Undivided.at(where(eqn), RUNS_OVER)
        if inside:
            raise Undivided.at(where(inside[-1]), f"{TOGETHER} inside {eqn.primitive.name}")
        kinds = [self._analysis.kind(v) for v in eqn.invars]
        how = REDUCTIONS[self._analysis.kind(eqn.outvars[0]).name]
        return Mask(eqn.primitive, kinds, how)

    def zeros(self) -> list[jax.Array]:
        """Returns the totals before the first part."""
        return [
            jnp.full(aval.shape, REDUCTIONS[x.how].neutral(aval.dtype), _wide(aval.dtype))
            for x in self._split.crossing
            for aval in [x.variable.aval]
        ]

    def add(self, totals: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
        """Combines the totals of some parts with those of others."""
        return [
            REDUCTIONS[x.how].of_two(a, b)
            for x, a, b in zip(self._split.crossing, totals, others, strict=True)
        ]

    def part(
        self, args: Sequence[jax.Array], counts: jax.Array | None
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the function on a part of the batch, as far as it works row by row.

        Args:
          args: The function's arguments, with a part of the batch.
          counts: bool [rows of the part], whether a row is one of the batch's; None where all are.

        Returns:
          The reductions over these rows, and the results that hold rows, each with the rows in its
          first dimension.
        """

        def run(eqn: Equation, values: list[jax.Array]) -> Sequence[jax.Array]:
            if counts is not None and eqn.outvars and eqn.outvars[0] in self._masks:
                values = self._masks[eqn.outvars[0]](values, counts)
            return jaxprs.bind_in_context(eqn, values)

        outs = jaxprs.evaluate(self._split.micro, args, run, opens=lambda eqn: False)
        n = len(self._split.crossing)
        totals = [x.astype(_wide(x.dtype)) for x in outs[:n]]
        kinds = [x.kind for x in self._split.stacked]
        return totals, [self._in_front(x, kind) for x, kind in zip(outs[n:], kinds, strict=True)]

    def _in_front(self, x: jax.Array, kind: RowKind) -> jax.Array:
        x, rows = jnp.moveaxis(x, kind.dim, 0), self._rows
        return x.reshape(rows, x.shape[0] // rows, *x.shape[1:])

    def finish(
        self,
        args: Sequence[jax.Array | None],
        totals: Sequence[jax.Array],
        rows: Sequence[jax.Array],
    ) -> list[jax.Array]:
        """Returns the function's results.

        Args:
          args: The function's arguments; the batch is not read and may be None.
          totals: The totals of all parts.
          rows: The results that hold rows, for the full batch, with the rows in the first
            dimension.
        """
        split = self._split
        crossing = [
            total if x.wide else total.astype(x.variable.aval.dtype)
            for x, total in zip(split.crossing, totals, strict=True)
        ]
        done = jaxprs.evaluate(split.once, [*args, *crossing], opens=lambda eqn: False)
        results = dict(zip(split.done, done, strict=True))
        for by_part, x in zip(split.stacked, rows, strict=True):
            x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
            results[by_part.position] = jnp.moveaxis(x, 0, by_part.kind.dim)
        return [results[i] for i in range(len(results))]


def _wide(dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype in which the results of parts are combined."""
    return jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
