"""What each value of a step has to do with the rows of the batch, by abstract interpretation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core
from jax.extend.core import primitives as prims

from zerojax.accumulation.flat import Flat
from zerojax.accumulation.kinds import (
    FIXED,
    ZERO,
    Kind,
    Node,
    join,
    mixed,
    together,
)
from zerojax.accumulation.lines import where
from zerojax.accumulation.pairs import Pair, pairs, scaled
from zerojax.accumulation.row_rules import OPAQUE, RULES
from zerojax.accumulation.sum_rules import reduced
from zerojax.xla import jaxprs

_ZERO_STAYS = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "mul", "name", "neg", "reshape",
    "sharding_constraint", "squeeze", "transpose", "add", "add_any", "slice", "concatenate",
    "reduce_sum",
})  # fmt: skip
_MIXES = "combines rows of the batch with each other"

# A path names an equation: its position in the step, and in each program within.
Path = tuple[int, ...]


@dataclass(frozen=True)
class Conflict:
    """A number made of all rows that goes back into the rows.

    Attributes:
      kind: of the number.
      backward: it does so in the backward pass.
      where: the equation.
    """

    kind: Kind
    backward: bool
    where: str


@dataclass
class Choices:
    """What is known of a step's numbers of all rows.

    Attributes:
      first: variables that follow from the batch alone, and are made before the micro-batches.
      own: reductions that each micro-batch makes for itself.
    """

    first: set[Any] = field(default_factory=set)
    own: set[Path] = field(default_factory=set)


class Analysis:
    """One pass over a step.

    Args:
      whole, micro: the step traced on the whole batch and on a micro-batch.
      given: the kinds of its arguments.
      choices: see :class:`Choices`.
      hopeful: a conflict is noted, and the pass goes on as if it were resolved.

    Attributes:
      pairs: the equations of both traces.
      kinds: by variable of ``whole``.
      conflicts: in order.
      drawn: where noise is drawn in the batch's shape.
      owners: where the forward pass makes numbers that are a micro-batch's own.
      literals: equations that need the micro-batch's own number of rows.
      backward: by reduction over rows, whether the backward pass makes it.

    Raises:
      UnevenError: the two programs differ in more than shapes.
    """

    def __init__(
        self,
        whole: Flat,
        micro: Flat,
        given: Sequence[Kind],
        choices: Choices,
        hopeful: bool,
    ) -> None:
        self.choices, self.hopeful = choices, hopeful
        self.conflicts: list[Conflict] = []
        self.drawn: list[str] = []
        self.owners: list[str] = []
        self.literals: set[Path] = set()
        self.backward: dict[Path, bool] = {}
        self.kinds: dict[Any, Kind] = {}
        self.pairs: list[Pair] = []
        rows = (v for v, k in zip(whole.invars, given, strict=True) if k.rows)
        self._rows = next(rows).aval.shape[0]
        self._run(whole, micro, given, (), False, self.kinds, self.pairs)

    def kind(self, atom: Any) -> Kind:
        """The kind of a variable of ``whole``, or of a literal."""
        return _literal(atom) if isinstance(atom, core.Literal) else self.kinds[atom]

    def _run(
        self,
        whole: Any,
        micro: Any,
        given: Sequence[Kind],
        path: Path,
        backward: bool,
        env: dict[Any, Kind],
        matched: list[Pair],
    ) -> list[Kind]:
        """Interprets a program; the kinds of its results."""
        top = not path
        for w, m in zip(whole.constvars, micro.constvars, strict=True):
            env[w] = FIXED if w.aval.shape == m.aval.shape else _constant(w, m)
        env.update(zip(whole.invars, given, strict=True))

        def read(atom: Any) -> Kind:
            return _literal(atom) if isinstance(atom, core.Literal) else env[atom]

        for i, pair in enumerate(pairs(whole.eqns, micro.eqns)):
            matched.append(pair)
            eqn = pair.whole
            kinds = [read(v) for v in eqn.invars]
            here = (*path, i)
            later = backward or jaxprs.is_transposed(eqn)
            outs = self._equation(pair, kinds, here, later)
            for v, kind in zip(eqn.outvars, outs, strict=True):
                if top:
                    kind = FIXED if v in self.choices.first else kind.but(home=v)
                env[v] = kind
            if any(k.name == "own" or k.index for k in outs):
                self.literals.add(here)
        return [read(v) for v in whole.outvars]

    def _equation(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        eqn = pair.whole
        if not eqn.outvars:
            return []
        if not backward:
            kinds = [k.added for k in kinds]
        if bad := [k for k in kinds if k.name == "mixed"]:
            return [bad[0].but(home=None)] * len(eqn.outvars)
        if any(k.name == "row" for k in kinds):
            return self._of_row(eqn, kinds)
        in_rows = any(k.rows for k in kinds)
        if _has_body(eqn) and (in_rows or _grows(pair) or any(k.name == "own" for k in kinds)):
            return self._within(pair, kinds, path, backward)
        if in_rows or _grows(pair):
            return self._of_rows(pair, kinds, path, backward)
        nested = len(path) > 1
        if any(k.needs_whole for k in kinds):
            return self._of_numbers(eqn, kinds, nested)
        if any(k.name == "own" for k in kinds):
            return [Kind("own", adds=_adds(eqn, kinds), **together(kinds))] * len(eqn.outvars)
        return self._of_fixed(pair, kinds)

    def _of_fixed(self, pair: Pair, kinds: list[Kind]) -> list[Kind]:
        eqn, both = pair.whole, together(kinds)
        if not _grows(pair):
            zero = eqn.primitive.name in _ZERO_STAYS and bool(kinds)
            product = eqn.primitive.name == "mul"
            zero = zero and (any if product else all)(k.zero for k in kinds)
            return [Kind("fixed", zero=zero, **both)] * len(eqn.outvars)
        outs = []
        for w, m in zip(eqn.outvars, pair.micro.outvars, strict=True):
            dims = scaled(w.aval, m.aval)
            name = eqn.primitive.name
            if len(dims) != 1:
                outs.append(Kind("fixed", **both) if not dims else mixed(_MIXES, where(eqn)))
            elif name.startswith(("random_", "threefry", "rng_")):
                self.drawn.append(where(eqn))
                outs.append(Kind("rows", dim=dims[0], **both))
            elif name == "iota":
                along = jaxprs.param(eqn, "dimension") == dims[0]
                own = along and w.aval.shape[dims[0]] == self._rows
                index = "own" if own else "number" if along else ""
                outs.append(Kind("rows", dim=dims[0], index=index, **both))
            elif name == "broadcast_in_dim":
                outs.append(Kind("rows", dim=dims[0], zero=kinds[0].zero, learned=both["learned"]))
            else:
                outs.append(mixed("makes numbers of the batch's size", where(eqn)))
        return outs

    def _of_rows(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        eqn = pair.whole
        name, both = eqn.primitive.name, together(kinds)
        if name == "optimization_barrier":
            return [k.but(home=None) for k in kinds]
        adds_up = name in ("scatter-add", "scatter_add") and kinds[0].name == "sum"
        if numbers := [k for k in kinds[adds_up:] if k.needs_whole]:
            if self.hopeful:
                found = [Conflict(k, backward, where(eqn)) for k in numbers]
                self.conflicts += found
                kinds = [
                    Kind("own", **together([k]))
                    if k.needs_whole and not (adds_up and i == 0)
                    else k
                    for i, k in enumerate(kinds)
                ]
            else:
                return [mixed("uses a number made of all rows within the rows", where(eqn))] * len(
                    eqn.outvars
                )
        if name in OPAQUE:
            return self._opaque(pair, both)
        if not any(k.rows for k in kinds):
            return self._of_fixed(pair, kinds)
        rule = RULES.get(name)
        out = None if rule is None else rule(eqn, kinds)
        if out is None:
            why = _MIXES if rule is not None else "is not known to keep rows apart"
            return [mixed(why, where(eqn))] * len(eqn.outvars)
        if name.startswith(("random_", "threefry")) and out.index:
            self.drawn.append(where(eqn))
            out = out.but(index="")
        if out.reduced:
            self.backward[path] = backward
            if path in self.choices.own:
                if not backward:
                    self.owners.append(where(eqn))
                adds = backward and out.name == "sum"
                own = Kind("own", adds=adds, learned=out.learned, node=Node(path))
                return [own] * len(eqn.outvars)
            before = tuple(k.node for k in kinds if k.reduced and k.node is not None)
            return [out.but(node=Node(path, before))] * len(eqn.outvars)
        return self._checked(pair, out.but(home=None, guarded=(), node=None))

    def _checked(self, pair: Pair, out: Kind) -> list[Kind]:
        """A layout of rows, where it is what the shapes say."""
        if pair.micro is None:
            return [out] * len(pair.whole.outvars)
        outs = []
        for w, m in zip(pair.whole.outvars, pair.micro.outvars, strict=True):
            same = out.rows and scaled(w.aval, m.aval) == [out.dim]
            outs.append(out if same else mixed(_MIXES, where(pair.whole)))
        return outs

    def _opaque(self, pair: Pair, both: dict[str, Any]) -> list[Kind]:
        outs = []
        for w, m in zip(pair.whole.outvars, pair.micro.outvars, strict=True):
            dims = scaled(w.aval, m.aval)
            if len(dims) == 1:
                outs.append(Kind("rows", dim=dims[0], outer=1, **both))
            else:
                outs.append(mixed(_MIXES, where(pair.whole)) if dims else Kind("sum", **both))
        return outs

    def _of_numbers(self, eqn: Any, kinds: list[Kind], nested: bool) -> list[Kind]:
        """Reductions over rows and what was made of them, without rows."""
        whole = Kind("whole", **together(kinds))
        if any(k.name == "own" for k in kinds):
            if eqn.primitive.name == "select_n" and kinds[0].needs_whole:
                return [whole.but(guarded=tuple(eqn.invars[1:]))]
            # A micro-batch's part of a sum times its own number is its part of another sum.
            if all(k.name in ("own", "fixed", "sum") for k in kinds) and _adds(eqn, kinds):
                return [Kind("sum", **together(kinds))] * len(eqn.outvars)
            return [
                mixed("combines a micro-batch's own number with the whole batch's", where(eqn))
            ] * len(eqn.outvars)
        if eqn.primitive.name == "optimization_barrier":
            return [k.but(home=None) for k in kinds]
        if not any(k.name == "whole" for k in kinds):
            found = reduced(eqn, kinds)
            if found is not None:
                return [found] * len(eqn.outvars)
        if nested:
            return [
                mixed("computes with a number made of all rows inside a loop", where(eqn))
            ] * len(eqn.outvars)
        if eqn.primitive.name == "select_n":
            whole = whole.but(guarded=tuple(eqn.invars[1:]))
        return [whole] * len(eqn.outvars)

    def _within(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        """An equation with programs inside, which meet rows of the batch."""
        eqn, micro = pair
        if eqn.primitive is prims.scan_p:
            return self._scan(pair, kinds, path, backward)
        if eqn.primitive is prims.while_p:
            return self._while(pair, kinds, path, backward)
        if eqn.primitive is prims.cond_p:
            return self._cond(pair, kinds, path, backward)
        inner = [jaxprs.called(e) for e in (eqn, micro)]
        return self._body(inner, kinds, path, backward)

    def _body(
        self, inner: Iterable[Any], kinds: Sequence[Kind], path: Path, backward: bool, at: int = 0
    ) -> list[Kind]:
        whole, micro = (jaxprs.open_jaxpr(j)[0] for j in inner)
        return self._run(whole, micro, kinds, (*path, at), backward, {}, [])

    def _scan(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        eqn, micro = pair
        if jaxprs.param(eqn, "length") != jaxprs.param(micro, "length"):
            return self._over_rows(pair, kinds, path, backward)
        a, n = jaxprs.scan_counts(eqn)
        consts, xs = kinds[:a], kinds[a + n :]
        carry = [k.but(home=None) for k in kinds[a : a + n]]
        if any(x.rows and x.dim == 0 for x in xs):
            return [mixed(_MIXES, where(eqn))] * len(eqn.outvars)
        sliced = [x.but(dim=x.dim - 1) if x.rows else x for x in xs]
        inner = [jaxprs.param(eqn, "jaxpr"), jaxprs.param(micro, "jaxpr")]
        for _ in range(len(carry) + 3):
            outs = self._body(inner, [*consts, *carry, *sliced], path, backward)
            new = [join(old, o, where(eqn)) for old, o in zip(carry, outs[:n], strict=True)]
            if [_shape_of(k) for k in new] == [_shape_of(k) for k in carry]:
                break
            carry = new
        stacked = [y.but(dim=y.dim + 1) if y.rows else y for y in outs[n:]]
        return [k.but(home=None) for k in (*new, *stacked)]

    def _over_rows(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        """A loop over the rows themselves, as ``lax.map`` makes: each by itself, but for sums."""
        eqn, micro = pair
        a, n = jaxprs.scan_counts(eqn)
        if any(k.rows for k in kinds[: a + n]):
            return [mixed(_MIXES, where(eqn))] * len(eqn.outvars)
        carry = [Kind("sum", learned=k.learned) if k.zero else k for k in kinds[a : a + n]]
        one = [Kind("row", learned=k.learned) if k.rows else k for k in kinds[a + n :]]
        inner = [jaxprs.param(eqn, "jaxpr"), jaxprs.param(micro, "jaxpr")]
        outs = self._body(inner, [*kinds[:a], *carry, *one], path, backward)
        why = "loops over the rows and carries numbers along"
        body = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0]
        kept = [out is given for out, given in zip(body.outvars, body.invars[a:], strict=False)]
        found: list[Kind] = []
        for at, (old, new) in enumerate(zip(carry, outs[:n], strict=True)):
            if not kept[at] and (old.name, new.name) != ("sum", "sum"):
                return [mixed(why, where(eqn))] * len(eqn.outvars)
            key = (*path, 0, at)
            self.backward[key] = backward
            found.append(new.but(home=None, node=Node(key) if new.reduced else None))
        for w, m, kind in zip(eqn.outvars[n:], micro.outvars[n:], outs[n:], strict=True):
            plain = scaled(w.aval, m.aval) == [0] and kind.name in ("row", "fixed")
            rows = Kind("rows", dim=0, outer=1, learned=kind.learned)
            found.append(rows if plain else mixed(why, where(eqn)))
        return found

    def _of_row(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        """One row at a time, within a loop over them."""
        both = together(kinds)
        if not any(k.needs_whole for k in kinds):
            return [Kind("row", learned=both["learned"])] * len(eqn.outvars)
        adds = eqn.primitive.name in ("add", "add_any", "scatter-add", "scatter_add")
        numbers = [k for k in kinds if k.needs_whole]
        if adds and len(numbers) == 1 and (numbers[0].name == "sum"):
            return [numbers[0].but(home=None, **both)]
        return [mixed("loops over the rows and carries numbers along", where(eqn))] * len(
            eqn.outvars
        )

    def _while(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        eqn = pair.whole
        loops = [jaxprs.while_parts(e) for e in pair]
        a = loops[0].cond_consts
        b = a + loops[0].body_consts
        carry = [k.but(home=None) for k in kinds[b:]]
        for _ in range(len(carry) + 3):
            bodies = [loop.body for loop in loops]
            outs = self._body(bodies, [*kinds[a:b], *carry], path, backward)
            new = [join(old, o, where(eqn)) for old, o in zip(carry, outs, strict=True)]
            if [_shape_of(k) for k in new] == [_shape_of(k) for k in carry]:
                break
            carry = new
        conds = [loop.cond for loop in loops]
        (going,) = self._body(conds, [*kinds[:a], *carry], path, backward, 1)
        if going.name not in ("fixed", "own"):
            return [mixed("loops as long as rows of the batch say", where(eqn))] * len(new)
        return [k.but(home=None) for k in new]

    def _cond(self, pair: Pair, kinds: list[Kind], path: Path, backward: bool) -> list[Kind]:
        eqn, micro = pair
        index, *operands = kinds
        if index.name not in ("fixed", "own"):
            why = "chooses what to do with the rows by a number made of all rows"
            return [mixed(why, where(eqn))] * len(eqn.outvars)
        both = zip(jaxprs.param(eqn, "branches"), jaxprs.param(micro, "branches"), strict=True)
        found = [self._body(b, operands, path, backward, i) for i, b in enumerate(both)]
        outs = found[0]
        for other in found[1:]:
            outs = [join(a, b, where(eqn)) for a, b in zip(outs, other, strict=True)]
        return [mixed(_MIXES, where(eqn)) if k.name == "whole" else k.but(home=None) for k in outs]


def _adds(eqn: Any, kinds: list[Kind]) -> bool:
    """Whether the result is a sum over micro-batches, of what each makes with its own numbers."""
    given = [FIXED if k.name == "own" and not k.adds else k.added for k in kinds]
    if not any(k.name == "sum" for k in given):
        return False
    found = reduced(eqn, given)
    return found is not None and found.name == "sum"


def _literal(atom: Any) -> Kind:
    return ZERO if np.ndim(atom.val) == 0 and not _is_key(atom.val) and atom.val == 0 else FIXED


def _is_key(x: Any) -> bool:
    return not isinstance(x, bool | int | float | complex | np.generic | np.ndarray)


def _constant(w: Any, m: Any) -> Kind:
    dims = scaled(w.aval, m.aval) if w.aval.ndim == m.aval.ndim else []
    return mixed("has an array of the batch's size of its own", f"shape {w.aval.shape}, {dims}")


def _has_body(eqn: Any) -> bool:
    loops = (prims.scan_p, prims.while_p, prims.cond_p)
    return eqn.primitive in loops or eqn.primitive in jaxprs.CALLS


def _grows(pair: Pair) -> bool:
    """Whether an array in the equation grows with the number of rows."""
    if pair.micro is None:
        return False
    outs = zip(pair.whole.outvars, pair.micro.outvars, strict=True)
    return any(w.aval.shape != m.aval.shape for w, m in outs)


def _shape_of(kind: Kind) -> Kind:
    """What a loop must leave as it is from iteration to iteration."""
    return kind.but(node=None, home=None, guarded=(), problem=None)
