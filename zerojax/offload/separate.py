"""An optimizer's update split into clusters, so that a few leaves can be updated at a time.

The update of the full state is traced once. Scalars that depend only on gradients and scalars
(a norm, a schedule, a bias correction) are the *prelude*, computed once a step. The rest falls into
*clusters*: leaves that enter each other's results, as a rule one parameter with its gradient and
its moments. If a cluster's arithmetic is elementwise, any of its rows can be updated separately;
otherwise (a trust ratio, an orthogonalisation) the cluster is updated unsplit. The clusters run the
optimizer's own traced equations, so that the numbers equal the optimizer's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from zerojax.graph.def_use import graph_of
from zerojax.graph.primitives import ELEMENTWISE
from zerojax.graph.reach import EQUATION_DEPENDS
from zerojax.graph.search import everything, holds
from zerojax.optim.over_matrices import is_call
from zerojax.trace.ravelled import without_ravels
from zerojax.xla import hijax, jaxprs
from zerojax.xla.types import Atom, Equation, Jaxpr, Shaped, Value

_MOST_COMPARED = 2**10  # elements of a constant
_OF_BITS = frozenset({"bitcast_convert_type", "shift_right_logical"})
"""Primitives that work element by element if their operands and results have one shape."""


@dataclass(frozen=True)
class Cluster:
    """Leaves that are updated together.

    Attributes:
      inputs: Positions among the update's arguments.
      outputs: Positions among the update's results.
      elementwise: Whether any rows can be updated separately; if so, all arrays have one shape.
      key: Equal for clusters that run the same program on the same shapes.
      matrices: Whether ``zerojax.over_matrices`` is called.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    elementwise: bool
    key: str
    matrices: bool = False


class Prelude(NamedTuple):
    """Results of the prelude.

    Attributes:
      scalars: Arrays of shape [] that the clusters need.
      shared: The update's results at the positions :attr:`SeparatedUpdate.shared`.
    """

    scalars: list[jax.Array]
    shared: list[jax.Array]


class SeparatedUpdate:
    """``update(*leaves) -> results`` split into a prelude and clusters.

    Args:
      update: A function of flat arguments, with flat results.
      arguments: Shapes and dtypes of the flat arguments.
      own: For each argument, whether it is one of the many that should not all be needed at once
        (parameters and moments are, gradients and scalars are not).

    Attributes:
      clusters: Leaves that are updated together.
      scalars: Variables that the prelude computes for the clusters, all of shape [].
      shared: Positions of the results that the prelude computes.
      read_by_prelude: Positions of the arguments that the prelude reads.
    """

    def __init__(
        self,
        update: Callable[..., Sequence[jax.Array]],
        arguments: Sequence[Shaped],
        own: Sequence[bool],
    ) -> None:
        traced, _ = hijax.trace(lambda *a: list(update(*a)), *arguments)
        # A call on all leaves, such as one under jax.jit, would tie them into one cluster.
        opens = lambda eqn: not is_call(eqn)  # noqa: E731
        closed = without_ravels(jaxprs.without_calls(traced, opens))
        self._jaxpr, self._consts = jaxprs.open_jaxpr(closed)
        self._graph = graph_of(self._jaxpr)
        self._at = {v: i for i, v in enumerate(self._jaxpr.invars)}
        self._first = _first_of_equal_scalars(self._jaxpr)
        found = EQUATION_DEPENDS.forward(self._jaxpr, [*own]).of
        self._heavy = {v for v, heavy in found.items() if heavy}
        outvars = self._jaxpr.outvars
        leaves = [i for i, v in enumerate(outvars) if self._of_leaf(v)]
        groups: list[tuple[set[int], set[int]]] = []  # positions of arguments, and of results
        needed: dict[Atom, None] = {}
        for i in leaves:
            ends = self._graph.backward_slice([outvars[i]], self._is_scalar).ends
            needed |= {self._first.get(x, x): None for x in ends if self._is_scalar(x)}
            inputs = {self._at[x] for x in ends if x in self._at and not self._is_scalar(x)}
            outputs = {i}
            for group in [g for g in groups if g[0] & inputs]:
                groups.remove(group)
                inputs |= group[0]
                outputs |= group[1]
            groups.append((inputs, outputs))
        self.shared: tuple[int, ...] = tuple(i for i in range(len(outvars)) if i not in leaves)
        self.scalars: tuple[Atom, ...] = tuple(needed)
        self.clusters: tuple[Cluster, ...] = tuple(itertools.starmap(self._cluster, groups))
        read = self._graph.backward_slice([*needed, *(outvars[i] for i in self.shared)]).ends
        self.read_by_prelude: set[int] = {self._at[v] for v in read if v in self._at}

    def _of_leaf(self, v: Atom) -> bool:
        return not isinstance(v, core.Literal) and (v in self._heavy or v.aval.ndim > 0)

    def _is_scalar(self, v: Atom) -> bool:
        """Returns whether ``v`` is a prelude scalar, independent of parameters and moments."""
        return v not in self._heavy and v.aval.ndim == 0

    def _cluster(self, inputs: set[int], outputs: set[int]) -> Cluster:
        """Converts connected arguments and results to a cluster."""
        ins, outs = tuple(sorted(inputs)), tuple(sorted(outputs))
        results = [self._jaxpr.outvars[i] for i in outs]
        arrays = [self._jaxpr.invars[i] for i in ins] + results
        shape = arrays[0].aval.shape
        equations, ends = self._graph.backward_slice(results, self._is_scalar)
        pairs = zip(self._jaxpr.constvars, self._consts, strict=True)
        # An array that the optimizer closes over would not be cut into rows.
        arrays_used = [x for v, x in pairs if v.aval.ndim and v in ends]
        elementwise = (
            bool(ins and shape and not arrays_used)
            and all(v.aval.shape == shape for v in arrays)
            and all(map(functools.partial(_by_element, shape), equations))
        )
        values = [self._jaxpr.invars[i].aval for i in ins]
        numbers = [v.aval for v in self.scalars]
        traced = jax.make_jaxpr(lambda s, *a: self.run(outs, ins, a, s))(numbers, *values)
        # The text of a jaxpr lacks the values of its constants.
        if all(map(_is_compared, arrays_used)):
            suffix = "".join(np.asarray(x).tobytes().hex() for x in arrays_used)
        else:
            suffix = f" for {outs}"
        matrices = holds(jaxprs.open_jaxpr(traced)[0], is_call, everything)
        return Cluster(ins, outs, elementwise, str(traced) + suffix, matrices)

    def prelude(self, arguments: Sequence[object]) -> Prelude:
        """Runs the prelude.

        Args:
          arguments: The update's arguments; parameters and moments are not read and may be None.
        """
        env = dict(zip(self._jaxpr.invars, arguments, strict=True))
        targets = [*self.scalars, *(self._jaxpr.outvars[i] for i in self.shared)]
        values = self._evaluate(targets, env, None)
        return Prelude(values[: len(self.scalars)], values[len(self.scalars) :])

    def run(
        self,
        outputs: Sequence[int],
        inputs: Sequence[int],
        values: Sequence[object],
        scalars: Sequence[object],
        shape: tuple[int, ...] | None = None,
    ) -> list[jax.Array]:
        """Returns the results of a cluster, or of rows of it.

        Args:
          outputs, inputs: The cluster's outputs and inputs.
          values: The arguments; rows of one ``shape`` if ``shape`` is given.
          scalars: The prelude's scalars.
          shape: Shape of the rows; None for a complete cluster.
        """
        env = dict(zip(self.scalars, scalars, strict=True))
        env |= {v: env[first] for v, first in self._first.items() if first in env}
        env |= {self._jaxpr.invars[i]: x for i, x in zip(inputs, values, strict=True)}
        return self._evaluate([self._jaxpr.outvars[i] for i in outputs], env, shape)

    def _evaluate(
        self, targets: Sequence[Atom], env: dict[Atom, Value], shape: tuple[int, ...] | None
    ) -> list[jax.Array]:
        """Computes ``targets`` from the values in ``env``: of complete arrays, or, if ``shape`` is
        given, of rows of this shape."""
        env = dict(zip(self._jaxpr.constvars, self._consts, strict=True)) | env

        def run(eqn: Equation, values: Sequence[Value]) -> Sequence[Value]:
            # The equation names the shape of the whole array.
            if shape is not None and eqn.primitive.name == "broadcast_in_dim":
                return [jnp.broadcast_to(jnp.asarray(values[0], eqn.outvars[0].aval.dtype), shape)]
            return jaxprs.bind(eqn, values)

        equations = self._graph.backward_slice(targets, env.__contains__).equations
        part = self._jaxpr.replace(eqns=[*equations], outvars=[*targets])
        return jaxprs.interpret(part, env, run)


def _is_compared(x: Any) -> bool:
    """Returns whether a constant's values are in a cluster's key; otherwise the key is unique."""
    is_here = isinstance(x, np.ndarray) or (
        not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    )
    return is_here and x.size <= _MOST_COMPARED and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _by_element(shape: tuple[int, ...], eqn: Equation) -> bool:
    """Returns whether rows of the result need only the same rows of the operands."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)}
    if eqn.primitive.name == "broadcast_in_dim":
        return shapes == {(), shape} and eqn.outvars[0].aval.shape == shape
    return eqn.primitive.name in ELEMENTWISE | _OF_BITS and shapes <= {(), shape}


def _first_of_equal_scalars(jaxpr: Jaxpr) -> dict[Atom, Atom]:
    """Returns, for each scalar that repeats the computation of an earlier one, the earlier one: an
    optimizer may compute a bias correction for each leaf."""
    seen: dict[object, Atom] = {}

    def run(eqn: Equation, operands: Sequence[object]) -> Sequence[Atom]:
        out, *others = eqn.outvars
        if eqn.primitive.name not in ELEMENTWISE or out.aval.ndim:
            return eqn.outvars
        # As text, because parameters and literals have no hash.
        return [seen.setdefault((eqn.primitive, str(eqn.params), *operands), out), *others]

    first: dict[Atom, Value] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    jaxprs.interpret(jaxpr, first, run, lambda v: (str(v.val), str(v.aval)))
    return {v: earlier for v, earlier in first.items() if earlier is not v}
