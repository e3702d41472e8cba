"""Equal functions of matrices of several parameters, run together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.collectives.decisions import EXCHANGE, UPDATE
from zerojax.collectives.ledger import Ledger
from zerojax.collectives.matrices.entry import run_unplaced
from zerojax.collectives.matrices.exchange import Exchange, axes_of
from zerojax.collectives.matrices.find import MatrixFunction
from zerojax.collectives.matrices.programs import for_one
from zerojax.graph.search import equations
from zerojax.plan import layout
from zerojax.plan.layout import Spec
from zerojax.plan.stored import pad
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom


@dataclass(frozen=True, eq=False)
class Member:
    """A function of one parameter's arrays.

    Attributes:
      function: The function.
      leading: The number of leading dimensions, whose entries are matrices of their own.
      shardings: The shardings of one matrix of each operand.
      program: The program for one matrix.
    """

    function: MatrixFunction
    leading: int
    shardings: Sequence[NamedSharding]
    program: AnyJaxpr

    @classmethod
    def of(cls, function: MatrixFunction, specs: Mapping[Atom, Spec], mesh: Mesh) -> Member | None:
        """Returns a function with its program; None if its stacks are sharded along the matrices,
        or no matrix is sharded, or the devices share matrices in different ways, or the context
        has another mesh (``jax.set_mesh``, ``jax.shard_map``)."""
        program, leading = for_one(function)
        own = [specs[v] for v in function.operands]
        if any(entry is not None for spec in own for entry in spec[:leading]):
            return None
        shardings = [layout.sharding(mesh, spec[leading:]) for spec in own]
        if not axes_of(shardings) or len({s.mesh for s in shardings}) > 1:
            return None
        context = jax.sharding.get_abstract_mesh()
        if not context.empty and context != shardings[0].mesh.abstract_mesh:
            return None
        return cls(function, leading, shardings, program)

    @property
    def operands(self) -> list[Atom]:
        """All that the function computes from."""
        return [*self.function.operands, *self.function.shared]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return math.prod(self.function.operands[0].aval.shape[: self.leading])


class Group:
    """Functions that run together: equal programs on equally sharded matrices.

    Args:
      members: The functions.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members, self._first = members, members[0]
        self._like, self._program = self._first.function.like, self._first.program
        self._counts = [m.count for m in members]

    @cached_property
    def _exchanges(self) -> list[Exchange]:
        """The exchange of each operand."""
        first = self._first
        axes, mesh = axes_of(first.shardings) or [], self._mesh
        devices = math.prod(mesh.shape[name] for names in axes for name in names)
        total = -(-sum(self._counts) // devices) * devices
        exchanges = []
        for v, sharding in zip(first.function.operands, first.shardings, strict=True):
            shape = v.aval.shape[first.leading :]
            padded = layout.padded_shape(shape, layout.full(sharding.spec, len(shape)), mesh)
            exchanges.append(Exchange(axes, shape, padded, sharding, total))
        return exchanges

    @property
    def _mesh(self) -> Any:
        return self._first.shardings[0].mesh

    def run(self, env: Mapping[Atom, Any], ledger: Ledger) -> dict[Atom, Any]:
        """Returns the results of the functions, computed from the values in `env`."""
        stacks = [
            [self._stack(env[m.function.operands[i]], e) for m in self.members]
            for i, e in enumerate(self._exchanges)
        ]
        shared = [env[v] for v in self._first.function.shared]
        specs = [PartitionSpec(None, *e.sharding.spec) for e in self._exchanges]
        mapped = jax.shard_map(
            self._on_device,
            mesh=self._mesh,
            in_specs=(specs, *(PartitionSpec() for _ in shared)),
            out_specs=[specs[i] for i in self._like],
            check_vma=False,
        )
        there = [
            (EXCHANGE, jax.ShapeDtypeStruct((e.total, *e.padded), x[0].dtype))
            for e, x in zip(self._exchanges, stacks, strict=True)
        ]
        place = ledger.place(UPDATE, "each device computes with some of the matrices")
        with place, ledger.instead(*there, *(there[i] for i in self._like)):
            outs = mapped(stacks, *shared)
        found = {}
        for i, (stack, like) in enumerate(zip(outs, self._like, strict=True)):
            for m, x in zip(self.members, stack, strict=True):
                v = m.function.results[i]
                unpadded = x[:, *map(slice, self._exchanges[like].shape)]
                found[v] = unpadded.reshape(v.aval.shape)
        return found

    @staticmethod
    def _stack(x: jax.Array, exchange: Exchange) -> jax.Array:
        """Returns an operand as [count, *shape], padded."""
        matrices = x.reshape(-1, *exchange.shape)
        return pad(matrices, (len(matrices), *exchange.padded))

    def _on_device(
        self, shards: list[list[jax.Array]], *shared: jax.Array
    ) -> list[list[jax.Array]]:
        """Returns the shards of the results from those of the operands, for each function."""
        own = [e.there(s) for e, s in zip(self._exchanges, shards, strict=True)]

        def of_matrix(*matrices: jax.Array) -> list[jax.Array]:
            return jaxprs.evaluate(self._program, [*matrices, *shared], run_unplaced)

        outs = jax.vmap(of_matrix)(*own)
        ends = [sum(self._counts[: i + 1]) for i in range(len(self._counts))]
        back = [self._exchanges[i].back(x) for i, x in zip(self._like, outs, strict=True)]
        return [jnp.split(x[: ends[-1]], ends[:-1]) for x in back]


def grouped(members: Sequence[Member]) -> list[Group]:
    """Returns the groups of functions, none of which computes from the result of another one."""
    groups: dict[object, list[Member]] = {}
    for m in members:
        key = (
            str(m.program),
            _arrays(m.program),
            tuple(map(id, m.function.shared)),
            tuple(m.function.like),
            tuple(m.shardings),
        )
        groups.setdefault(key, []).append(m)
    return [*map(Group, groups.values())]


def _arrays(program: AnyJaxpr) -> tuple[bytes, ...]:
    """Returns the values of a program's constant arrays, which its text may leave out."""
    jaxpr, consts = jaxprs.open_jaxpr(program)
    atoms = (v for eqn in equations(jaxpr) for v in eqn.invars)
    inside = (jaxprs.read(v, {}) for v in atoms if isinstance(v, core.Literal))
    return tuple(np.asarray(x).tobytes() for x in (*consts, *inside) if np.ndim(x))
