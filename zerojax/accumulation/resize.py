"""A step for micro-batches of fewer rows than it can be traced on.

jax traces another program where a dimension has size 1: it neither broadcasts nor sums along the
dimension. So the step is traced on a few rows, and then resized to a single row, shape by shape.
A step whose ``shard_map`` divides the rows among devices is traced on rows for all devices, and
resized to the rows of one device, on which the function of the ``shard_map`` is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType

from zerojax.accumulation.flat import Flat, Variable
from zerojax.accumulation.lines import where
from zerojax.accumulation.pairs import EquationPair, Sizes, UnevenError, alike_in_shape, pairs
from zerojax.xla import jaxprs
from zerojax.xla.types import AnyJaxpr, Atom, Aval, Jaxpr


def micro_batch(global_flat: Flat, traced: Flat, sizes: Sizes) -> Flat:
    """Returns the step on a micro-batch, derived from its trace on ``sizes.traced`` rows.

    Raises:
      UnevenError: The trace differs from the step on the global batch in more than shapes.
    """
    if sizes.traced == sizes.micro_rows:
        return traced
    return Resize(sizes).flat(global_flat, traced)


class Resize:
    """Conversion of a step, traced on the full batch and on a few rows, to a micro-batch's rows."""

    def __init__(self, sizes: Sizes) -> None:
        self._full, self._few, self._rows = sizes.global_rows, sizes.traced, sizes.micro_rows
        self._sizes = Sizes(self._full, self._few)

    def flat(self, full: Flat, few: Flat) -> Flat:
        """Returns the flat program on the micro-batch's rows, equation by equation the one on a few
        rows."""
        env: dict[Atom, Variable] = {}

        def resized(w: Atom, v: Any) -> Variable:
            shape = self._shape(w.aval, v.aval)
            same = shape == getattr(v.aval, "shape", ())
            env[v] = Variable(v.aval if same else v.aval.update(shape=shape))
            return env[v]

        def read(w: Atom, v: Atom) -> Atom:
            return self._literal(w, v) if isinstance(v, core.Literal) else env[v]

        invars: list[Atom] = [resized(w, v) for w, v in zip(full.invars, few.invars, strict=True)]
        constvars: list[Atom] = [
            resized(w, v) for w, v in zip(full.constvars, few.constvars, strict=True)
        ]
        eqns = []
        for pair in pairs(full, few, self._sizes):
            w, f = pair
            ins = [read(a, b) for a, b in zip(w.invars, f.invars, strict=True)]
            outs = [resized(a, b) for a, b in zip(w.outvars, f.outvars, strict=True)]
            params = self._params(pair)
            if _divides_rows(pair):
                given = [jaxprs.like(v.aval) for v in ins]
                closed = jax.make_jaxpr(functools.partial(_on_one_device, pair))(*given)
                (only,) = jaxprs.open_jaxpr(closed)[0].eqns
                params = only.params
            eqns.append(f.replace(invars=ins, outvars=outs, params=params))
        outvars = [read(w, v) for w, v in zip(full.outvars, few.outvars, strict=True)]
        return Flat(invars, eqns, outvars, constvars, few.consts)

    def _shape(self, full: Aval, few: Aval) -> tuple[int, ...]:
        shapes = zip(getattr(full, "shape", ()), getattr(few, "shape", ()), strict=True)
        return tuple(self._size(w, f) for w, f in shapes)

    def _size(self, full: int, few: int) -> int:
        if full == few:
            return few
        if full * self._few != few * self._full:
            raise UnevenError(f"a dimension has {full} elements for {self._full} rows")
        rows = few * self._rows
        return rows // self._few if isinstance(few, int) else rows / self._few

    def _literal(self, full: Any, few: Any) -> core.Literal:
        alike = not isinstance(full, core.Literal) or few.aval.shape or full.val == few.val
        if alike or full.val * self._few != few.val * self._full:
            return few
        value = few.val * self._rows / self._few
        return core.Literal(np.asarray(value, few.aval.dtype), few.aval)

    def _params(self, pair: EquationPair) -> dict[str, object]:
        global_eqn, few = pair
        # The numbers become the global batch's, see literals.
        if alike_in_shape(pair) or _divides_rows(pair):
            return dict(few.params)
        return {
            name: self._param(global_eqn.params[name], value, pair)
            for name, value in few.params.items()
        }

    def _param(self, full: Any, few: Any, pair: EquationPair) -> object:
        if type(few) is tuple and type(full) is tuple and len(few) == len(full):
            return tuple(self._param(w, f, pair) for w, f in zip(full, few, strict=True))
        if all(isinstance(x, int | np.integer) and not isinstance(x, bool) for x in (full, few)):
            return self._size(int(full), int(few))  # numpy ints in a slice gradient's padding
        if jaxprs.is_jaxpr(few):
            return self._body(full, few, where(pair.global_eqn))
        return few

    def _body(self, full: AnyJaxpr, few: AnyJaxpr, at: str) -> AnyJaxpr:
        """Returns the inner program of an equation on the micro-batch's rows; ``few`` itself if no
        shape in it depends on the rows."""
        (w, _), (f, consts) = jaxprs.open_jaxpr(full), jaxprs.open_jaxpr(few)
        if str([v.aval for v in w.invars]) == str([v.aval for v in f.invars]) and all(
            map(alike_in_shape, map(EquationPair, w.eqns, f.eqns))
        ):
            return few
        given = [
            jaxprs.like(b.aval, self._shape(a.aval, b.aval))
            for a, b in zip(w.invars, f.invars, strict=True)
        ]
        closed = jax.make_jaxpr(lambda *args: self._run(w, f, consts, args))(*given)
        inner, extra_consts = jaxprs.open_jaxpr(closed)
        if inner is closed or few is not f:
            return closed
        if extra_consts:
            raise UnevenError(at)
        return inner

    def _run(
        self, full: Jaxpr, few: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Evaluates the inner program of an equation on arguments of the micro-batch's rows."""
        env = dict(zip((*few.constvars, *few.invars), (*consts, *args), strict=True))

        def read(w: Atom, v: Atom) -> jax.Array:
            return self._literal(w, v).val if isinstance(v, core.Literal) else env[v]

        for pair in pairs(full, few, self._sizes):
            w, f = pair
            values = [read(a, b) for a, b in zip(w.invars, f.invars, strict=True)]
            outs: Sequence[jax.Array]
            if _divides_rows(pair):
                outs = _on_one_device(pair, *values)
            else:
                outs = jaxprs.bind(f.replace(params=self._params(pair)), values)
            env.update(zip(f.outvars, outs, strict=True))
        return [read(w, v) for w, v in zip(full.outvars, few.outvars, strict=True)]


def _divides_rows(pair: EquationPair) -> bool:
    """Returns whether an equation is a ``shard_map`` that divides rows among devices."""
    return pair.micro_eqn.primitive.name == "shard_map" and not alike_in_shape(pair)


def _on_one_device(pair: EquationPair, *values: jax.Array) -> list[jax.Array]:
    """Runs the function of a ``shard_map`` on the rows of one device, as a ``shard_map`` on one.

    Raises:
      UnevenError: None of the traces has the function on as many rows.
    """
    shapes = [jnp.shape(x) for x in values]
    for eqn in pair[::-1]:
        body = jaxprs.open_jaxpr(jaxprs.param(eqn, "jaxpr"))[0]
        if [v.aval.shape for v in body.invars] == shapes:
            break
    else:
        raise UnevenError(where(pair.global_eqn))
    names = jaxprs.param(eqn, "mesh").axis_names

    def run(*args: jax.Array) -> list[jax.Array]:
        return jaxprs.evaluate(body, args, run=jaxprs.bind_anywhere)

    mapped = jax.shard_map(
        run,
        mesh=AbstractMesh((1,) * len(names), names, axis_types=(AxisType.Auto,) * len(names)),
        in_specs=jaxprs.param(eqn, "in_specs"),
        out_specs=[*jaxprs.param(eqn, "out_specs")],
        axis_names=jaxprs.param(eqn, "newly_manual_axes"),
        check_vma=False,
    )
    outs: list[jax.Array] = mapped(*values)
    return outs
