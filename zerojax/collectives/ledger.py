"""A record of the collectives that are emitted while a step is traced, if a caller asks for it.

Each emission site enters :meth:`Ledger.gathers`, :meth:`Ledger.reduces` or
:meth:`Ledger.exchanges` around the constraint that causes the collective. The ledger records a
:class:`zerojax.collectives.decisions.Decision`, and puts its number into the name scope of the
equations that are traced within. From these names :mod:`zerojax.step.emitted` finds the equations
of each decision; a decision whose trace was discarded has none.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from zerojax.collectives import decisions
from zerojax.collectives.decisions import Decision, group, payload, summed_over
from zerojax.devices.mesh import STAGE, stage_size, zero_axis
from zerojax.plan import layout
from zerojax.plan.layout import SpecEntry
from zerojax.xla.types import Equation, Shaped

_TAG = re.compile(r"zerojax-decision-(\d+)")

_GATHERED = "gathered at each use, not kept"
_REDUCED = "reduced where the gradient is produced"


class Ledger:
    """Decisions in the order of emission.

    Args:
      mesh: The mesh of all specs.
      asked: Whether a caller reads the ledger; otherwise the ledger records nothing.
    """

    asked: bool

    def __init__(self, mesh: Mesh | AbstractMesh, *, asked: bool = False) -> None:
        self._mesh, self.asked = mesh, asked
        self._noted: list[tuple[Decision, ...]] = []
        self._replacing: set[int] = set()
        self._complete: set[int] = set()
        self._places: list[tuple[str, str]] = []
        self._calls: list[Equation] = []
        self._over, self._partly, self._deferred = summed_over(mesh), False, False

    def on_lanes(self, axes: Sequence[str]) -> Ledger:
        """Returns a view of this ledger for a program that runs on lanes along ``axes`` of the
        mesh, over which nothing is summed."""
        lanes = copy.copy(self)
        lanes._over //= math.prod(self._mesh.shape[name] for name in axes)
        lanes._partly = True
        return lanes

    def without_reductions(self) -> Ledger:
        """Returns a view of this ledger for a program whose reductions XLA moves after the loop
        that contains it."""
        other = copy.copy(self)
        other._deferred = True
        return other

    @contextlib.contextmanager
    def place(self, where: str, reason: str = "") -> Iterator[None]:
        """Sets the place and the reason of the decisions that are recorded in this context."""
        self._places.append((where, reason))
        try:
            yield
        finally:
            self._places.pop()

    @contextlib.contextmanager
    def within(self, call: Equation) -> Iterator[None]:
        """Adds a call to the decisions that are recorded in this context. The equations of a jaxpr
        that JAX has cached from an earlier call have the source lines of that call."""
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()

    def gathers(
        self, x: Shaped, cut: Sequence[SpecEntry], less: Sequence[SpecEntry]
    ) -> contextlib.AbstractContextManager[object]:
        """Records an all-gather; returns the context for the constraint to ``less`` of an array
        sharded by ``cut``."""
        if not self.asked or group(cut, less, self._mesh) < 2:
            return contextlib.nullcontext()
        return self._note((decisions.GATHER, x, cut, less, group(cut, less, self._mesh)))

    def reduces(
        self,
        x: Shaped,
        before: Sequence[SpecEntry],
        after: Sequence[SpecEntry],
        *,
        over: int | None = None,
        partly: bool = False,
    ) -> contextlib.AbstractContextManager[object]:
        """Records a reduce-scatter, an all-reduce, or both; returns the context for the constraint
        to ``after`` of partial sums that are sharded by ``before``.

        Args:
          x: An array of the sum's shape and dtype.
          before, after: The specs.
          over: The number of devices that hold a partial sum; None for all devices with different
            rows or tokens, of one pipeline stage if "stage" shards the array.
          partly: Whether a later collective adds the partial sums of further devices.
        """
        if not self.asked:
            return contextlib.nullcontext()
        if self._deferred:
            return self._note()
        n = group(after, before, self._mesh)
        remaining = (self._summed(before) if over is None else over) // max(n, 1)
        sent = [(decisions.SCATTER, x, after, before, n)] if n > 1 else []
        if remaining > 1:
            sent.append((decisions.REDUCE, x, after, after, remaining))
        return self._note(*sent, partly=partly or self._partly)

    def instead(self, *sent: tuple[str, Shaped]) -> contextlib.AbstractContextManager[object]:
        """Records the collectives that XLA emits for an equation, as pairs of kind and array, in
        place of the decisions recorded inside; returns the context for the equation."""
        if not self.asked or self._over < 2:
            return contextlib.nullcontext()
        self._replacing.add(len(self._noted))
        specs = ((None,) * len(x.shape) for _, x in sent)
        pairs = zip(sent, specs, strict=True)
        return self._note(*((kind, x, spec, spec, self._over) for (kind, x), spec in pairs))

    def completes(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context for the constraint of a value that needs no reduction, although it is
        computed from rows: each device computes its shard from all rows."""
        if not self.asked:
            return contextlib.nullcontext()
        self._complete.add(len(self._noted))
        return self._note()

    def over(self, parts: Iterable[int], spec: Sequence[SpecEntry]) -> list[int]:
        """Returns the number of devices in each of several successive sums of an array that is
        sharded by ``spec``, the last of which is over all remaining devices."""
        sizes = list(parts)
        return [*sizes[:-1], self._summed(spec) // math.prod(sizes[:-1])]

    def _summed(self, spec: Sequence[SpecEntry]) -> int:
        """Returns the number of devices that hold a partial sum of an array."""
        n = stage_size(self._mesh) if layout.dimensions(spec, STAGE) else 1
        return self._over // n

    def exchanges(
        self, x: Shaped, spec: Sequence[SpecEntry], devices: int
    ) -> contextlib.AbstractContextManager[object]:
        """Records an all-to-all; returns the context for the constraint by which devices exchange
        their shards of ``x``."""
        if not self.asked or devices < 2:
            return contextlib.nullcontext()
        return self._note((decisions.EXCHANGE, x, spec, spec, devices))

    def of_norm(self) -> Decision:
        """Returns the all-reduce of the square sums of the devices' shards, a scalar."""
        reason = "norm of sharded gradients"
        return Decision(
            decisions.REDUCE, (), "float32", 4, self._mesh.size, decisions.UPDATE, reason
        )

    def of_optimizer(self, x: Shaped, spec: Sequence[SpecEntry]) -> tuple[Decision, ...]:
        """Returns the reduction of a gradient to a spec at the optimizer, for a gradient that was
        not reduced before."""
        start = len(self._noted)
        with self.place(decisions.UPDATE, "reduced where the optimizer takes the gradient"):
            self._reduces_to(x, spec)
        recorded = tuple(decision for entry in self._noted[start:] for decision in entry)
        del self._noted[start:]
        return recorded

    @contextlib.contextmanager
    def reduces_after_loop(self, x: Shaped, spec: Sequence[SpecEntry]) -> Iterator[None]:
        """Returns the context for the constraint of a sum over micro-batches, at which XLA reduces
        the sum."""
        reason = "summed over all micro-batches first"
        with self.place(decisions.AFTER_LOOP, reason), self._reduces_to(x, spec):
            yield

    def _reduces_to(
        self, x: Shaped, spec: Sequence[SpecEntry]
    ) -> contextlib.AbstractContextManager[object]:
        full = layout.without(spec, zero_axis(self._mesh))
        is_even = layout.padded_shape(x.shape, spec, self._mesh) == x.shape
        return self.reduces(x, full, spec if is_even else full)  # uneven: XLA slices the full sum

    def __len__(self) -> int:
        return len(self._noted)

    def __getitem__(self, number: int) -> tuple[Decision, ...]:
        return self._noted[number]

    def numbers(self, names: str) -> list[int]:
        """Returns the numbers of the decisions that were recorded around an equation, outermost
        first, from the name scopes in which the equation was traced."""
        return list(map(int, _TAG.findall(names)))

    def replaces(self, number: int) -> bool:
        """Returns whether a decision replaces those that were recorded inside it."""
        return number in self._replacing

    def is_complete(self, number: int) -> bool:
        """Returns whether :meth:`completes` recorded a number."""
        return number in self._complete

    def _note(
        self,
        *found: tuple[str, Shaped, Sequence[SpecEntry], Sequence[SpecEntry], int],
        partly: bool = False,
    ) -> contextlib.AbstractContextManager[object]:
        self._noted.append(
            tuple(
                Decision(
                    kind,
                    tuple(x.shape),
                    x.dtype.name,
                    payload(x.shape, x.dtype, cut, less, self._mesh),
                    devices,
                    *self._place(kind),
                    partly=partly,
                    calls=tuple(self._calls),
                )
                for kind, x, cut, less, devices in found
            )
        )
        return jax.named_scope(f"zerojax-decision-{len(self._noted) - 1}")

    def _place(self, kind: str) -> tuple[str, str]:
        gathers = kind == decisions.GATHER
        where, reason = self._places[-1] if self._places else ("", "")
        where = where or (decisions.USE if gathers else decisions.PRODUCED)
        return where, reason or (_GATHERED if gathers else _REDUCED)
