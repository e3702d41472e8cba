"""The program for one entry of stacked arrays, from the program for the stacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives as prims
from jax.sharding import Sharding

from zerojax.graph.primitives import ELEMENTWISE, FACTORIZATIONS, LABELS
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Equation


class NotByEntry(Exception):
    """An equation does not compute each entry from the same entry of its operands, or has no
    rule."""


class Stack(NamedTuple):
    """A value, of whose entries only one is computed.

    Attributes:
      value: The array. Its dimension `at` is shorter by the number of entries.
      at: The dimension of the entries, its outermost factor; None for a value that all entries have
        in common.
      equal: The dimensions along which a common value repeats itself, in `value` of size 1.
    """

    value: Any
    at: int | None = None
    equal: frozenset[int] = frozenset()


class Entries:
    """Runs equations for one of `count` entries.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> gram = lambda x: x @ x.mT
      >>> closed = jax.make_jaxpr(gram)(jnp.ones((3, 2, 5)))
      >>> Entries(3).run(closed, [Stack(jnp.ones((1, 2, 5)), at=0)])[0].value.shape
      (1, 2, 2)
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def run(self, closed: AnyJaxpr, args: Sequence[Stack]) -> list[Stack]:
        """Runs a jaxpr.

        Raises:
          NotByEntry: The entries are not computed separately.
        """
        jaxpr, consts = jaxprs.open_jaxpr(closed)
        given = (*map(Stack, consts), *args)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))
        self.equations(jaxpr.eqns, env)
        return [_read(v, env) for v in jaxpr.outvars]

    def equations(self, equations: Sequence[Equation], env: dict[Atom, Stack]) -> None:
        """Runs equations on the values in `env`, and adds their results."""
        for eqn in equations:
            outs = self._equation(eqn, [_read(v, env) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))

    def _equation(self, eqn: Equation, operands: Sequence[Stack]) -> Sequence[Stack]:
        if eqn.primitive in jaxprs.CALLS:
            return self.run(jaxprs.called_jaxpr(eqn), operands)
        if all(x.at is None for x in operands):
            return _common(eqn, operands)
        if eqn.primitive is prims.scan_p:
            return self._scan(eqn, operands)
        if eqn.primitive is prims.cond_p:
            return self._cond(eqn, operands)
        rule = _RULES.get(eqn.primitive.name)
        if rule is None:
            raise NotByEntry(eqn.primitive.name)
        return rule(self, eqn, operands)

    def _bind(
        self,
        eqn: Equation,
        operands: Sequence[Stack],
        at: int | None,
        params: Mapping[str, object] | None = None,
    ) -> list[Stack]:
        values = [_full(x, v) if x.at is None else x.value for x, v in _pairs(operands, eqn)]
        return [Stack(out, at) for out in run_unplaced(eqn, values, params)]

    def _by_element(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        places = {x.at for x in operands if x.at is not None}
        if len(places) > 1:
            raise NotByEntry(eqn.primitive.name)
        (at,) = places
        return self._bind(eqn, [self._along(x, at, v) for x, v in _pairs(operands, eqn)], at)

    def _along(self, x: Stack, at: int, v: Atom) -> Stack:
        """Returns a common value in the form for one entry, of a stack along dimension `at`."""
        if x.at is not None or v.aval.ndim == 0 or v.aval.shape[at] == 1:
            return x
        if at not in x.equal:
            raise NotByEntry("a value that differs between the entries")
        shape = [n // self._count if d == at else n for d, n in enumerate(v.aval.shape)]
        return Stack(jnp.broadcast_to(x.value, shape), at)

    def _transpose(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        return self._bind(eqn, operands, jaxprs.param(eqn, "permutation").index(operands[0].at))

    def _squeeze(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        return self._without(eqn, operands, jaxprs.param(eqn, "dimensions"))

    def _reduce(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        return self._without(eqn, operands, jaxprs.param(eqn, "axes"))

    def _without(
        self, eqn: Equation, operands: Sequence[Stack], dimensions: Sequence[int]
    ) -> list[Stack]:
        """Runs an equation that removes dimensions."""
        at: Any = operands[0].at
        if at in dimensions:
            raise NotByEntry(eqn.primitive.name)
        return self._bind(eqn, operands, at - sum(int(d) < at for d in dimensions))

    def _broadcast(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        old, shape = eqn.invars[0].aval.shape, [*jaxprs.param(eqn, "shape")]
        from_at: Any = operands[0].at
        at = jaxprs.param(eqn, "broadcast_dimensions")[from_at]
        if shape[at] != old[from_at]:
            raise NotByEntry("broadcast_in_dim")
        shape[at] //= self._count
        return self._bind(eqn, operands, at, {"shape": tuple(shape)})

    def _reshape(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        old, sizes = eqn.invars[0].aval.shape, [*jaxprs.param(eqn, "new_sizes")]
        before = math.prod(old[: operands[0].at])
        fitting = (
            d
            for d, n in enumerate(sizes)
            if n % self._count == 0 and math.prod(sizes[:d]) == before
        )
        if (at := next(fitting, None)) is None or jaxprs.param(eqn, "dimensions") is not None:
            raise NotByEntry("reshape")
        sizes[at] //= self._count
        return self._bind(eqn, operands, at, {"new_sizes": tuple(sizes)})

    def _dot(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        contracted, batch = jaxprs.param(eqn, "dimension_numbers")
        places = []
        for i, (x, over, along) in enumerate(zip(operands, contracted, batch, strict=True)):
            if x.at in over:
                raise NotByEntry("dot_general")
            if x.at in along:
                other = batch[1 - i][along.index(x.at)]
                operands = [
                    y if j == i else self._along(y, other, v)
                    for j, (y, v) in enumerate(_pairs(operands, eqn))
                ]
                places.append(along.index(x.at))
            elif x.at is not None:
                free = [d for d in range(x.value.ndim) if d not in over and d not in along]
                first = operands[0].value.ndim - len(contracted[0]) if i else len(along)
                places.append(first + free.index(x.at))
        if len({*places}) > 1:
            raise NotByEntry("dot_general")
        return self._bind(eqn, operands, places[0])

    def _factorize(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        places = {x.at for x in operands}
        (at, *others) = places
        if others or at is None or at >= operands[0].value.ndim - 2:
            raise NotByEntry(eqn.primitive.name)
        return self._bind(eqn, operands, at)

    def _concatenate(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        if jaxprs.param(eqn, "dimension") in {x.at for x in operands}:
            raise NotByEntry("concatenate")
        return self._by_element(eqn, operands)

    def _scan(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        """Runs a loop, without unrolling it."""
        consts, carried = jaxprs.scan_counts(eqn)
        given, others = operands[:consts], _in_full(operands[consts:], eqn.invars[consts:])
        carry, entries = others[:carried], others[carried:]
        if any(x.at == 0 for x in entries):
            raise NotByEntry("scan")
        places: list[int | None] = []

        def body(values: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            args = [
                *given,
                *(Stack(x, old.at) for x, old in zip(values, carry, strict=True)),
                *(
                    Stack(x, None if old.at is None else old.at - 1)
                    for x, old in zip(slices, entries, strict=True)
                ),
            ]
            program = jaxprs.param(eqn, "jaxpr")
            outs = _in_full(self.run(program, args), jaxprs.open_jaxpr(program)[0].outvars)
            if [x.at for x in outs[:carried]] != [x.at for x in carry]:
                raise NotByEntry("scan")
            places[:] = [x.at for x in outs[carried:]]
            return [x.value for x in outs[:carried]], [x.value for x in outs[carried:]]

        last, stacked = lax.scan(
            body,
            [x.value for x in carry],
            [x.value for x in entries],
            length=jaxprs.param(eqn, "length"),
            reverse=jaxprs.param(eqn, "reverse"),
        )
        return [
            *(Stack(x, old.at) for x, old in zip(last, carry, strict=True)),
            *(Stack(x, None if p is None else p + 1) for x, p in zip(stacked, places, strict=True)),
        ]

    def _cond(self, eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
        index, *given = operands
        if index.at is not None:
            raise NotByEntry("cond")
        places: list[list[int | None]] = []

        def branch(jaxpr: AnyJaxpr) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                outs = _in_full(self.run(jaxpr, given), jaxprs.open_jaxpr(jaxpr)[0].outvars)
                places.append([x.at for x in outs])
                if places[-1] != places[0]:
                    raise NotByEntry("cond")
                return [x.value for x in outs]

            return run

        branches = [branch(jaxpr) for jaxpr in jaxprs.param(eqn, "branches")]
        outs = lax.switch(index.value, branches)
        return [Stack(x, at) for x, at in zip(outs, places[0], strict=True)]


def run_unplaced(
    eqn: Equation, values: Sequence[Any], params: Mapping[str, object] | None = None
) -> Sequence[Any]:
    """Runs an equation on other operands, without the sharding that it gives to its results."""
    unplaced = {name: None for name, x in eqn.params.items() if isinstance(x, Sharding)}
    return jaxprs.bind(eqn, values, {**eqn.params, **unplaced, **(params or {})})


def _read(v: Atom, env: Mapping[Atom, Stack]) -> Stack:
    return Stack(v.val) if isinstance(v, core.Literal) else env[v]


def _pairs(operands: Sequence[Stack], eqn: Equation) -> Iterator[tuple[Stack, Atom]]:
    return zip(operands, eqn.invars, strict=True)


def _full(x: Stack, v: Atom) -> Any:
    """Returns a common value in its own shape."""
    return jnp.broadcast_to(x.value, v.aval.shape) if x.equal else x.value


def _in_full(values: Sequence[Stack], variables: Sequence[Atom]) -> list[Stack]:
    """Returns values with the common ones in their own shape."""
    return [
        Stack(_full(x, v)) if x.at is None else x for x, v in zip(values, variables, strict=True)
    ]


def _repeated(x: Stack, v: Atom) -> frozenset[int]:
    """Returns the dimensions along which an operand of an element-wise equation repeats itself."""
    return x.equal | {d for d, n in enumerate(v.aval.shape) if n == 1}


def _common(eqn: Equation, operands: Sequence[Stack]) -> list[Stack]:
    """Runs an equation on common values."""
    name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
    if name == "broadcast_in_dim" and not operands[0].equal:
        used = jaxprs.param(eqn, "broadcast_dimensions")
        compact = tuple(n if d in used else 1 for d, n in enumerate(shape))
        (out,) = run_unplaced(eqn, [operands[0].value], {"shape": compact})
        return [Stack(out, equal=frozenset(range(len(shape))) - {*used})]
    if name in ELEMENTWISE and (
        arrays := [(x, v) for x, v in _pairs(operands, eqn) if v.aval.ndim]
    ):
        equal = frozenset.intersection(*(_repeated(x, v) for x, v in arrays))
        compact = tuple(1 if d in equal else n for d, n in enumerate(shape))
        values = [
            jnp.broadcast_to(x.value, compact) if v.aval.ndim else x.value
            for x, v in _pairs(operands, eqn)
        ]
        return [Stack(run_unplaced(eqn, values)[0], equal=equal)]
    return [
        Stack(out) for out in run_unplaced(eqn, [_full(x, v) for x, v in _pairs(operands, eqn)])
    ]


_Rule = Callable[[Entries, Equation, Sequence[Stack]], list[Stack]]
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys((ELEMENTWISE | LABELS) - {"sharding_constraint"}, Entries._by_element),
    **dict.fromkeys(FACTORIZATIONS, Entries._factorize),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"), Entries._reduce
    ),
    "transpose": Entries._transpose,
    "squeeze": Entries._squeeze,
    "broadcast_in_dim": Entries._broadcast,
    "reshape": Entries._reshape,
    "dot_general": Entries._dot,
    "concatenate": Entries._concatenate,
}
