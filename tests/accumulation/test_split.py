"""A step in micro-batches as data: what crosses between them, and what runs once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.accumulation.flat import flatten
from zerojax.accumulation.kinds import FIXED, RowKind
from zerojax.accumulation.resolve import analyse
from zerojax.accumulation.split import ByPart, Split, split
from zerojax.accumulation.symbolic import TracedRows
from zerojax.accumulation.traces import symbolic_program
from zerojax.xla import jaxprs

W = jnp.ones((8, 8))


def step(w: jax.Array, x: jax.Array) -> Any:
    weights = (x > 0).sum()  # of the batch alone
    loss, grads = jax.value_and_grad(lambda w: ((x @ w) ** 2).sum() / weights)(w)
    return w - 0.1 * grads / jnp.linalg.norm(grads), loss, x @ w, jnp.max(x)


def divided(rows: int) -> Split:
    one, two = (flatten(jax.make_jaxpr(step)(W, jnp.ones((n, 8))), [0], [1]) for n in (8, 4))
    symbolic = symbolic_program(one, two, TracedRows(8, 4))
    given = [FIXED.but(learned=True), RowKind("rows", dim=0, outer=1)]
    analysis, choices = analyse(symbolic, given, rows, [])
    by_part = [ByPart(2, analysis.kind(symbolic.flat.outvars[2]))]
    return split(symbolic, analysis, rows, choices.first, by_part, {}, {})


def test_what_crosses_and_what_runs_once() -> None:
    program = divided(2)
    assert {(x.how, x.variable.aval.shape) for x in program.crossing} == {
        ("sum", (8, 8)), ("sum", ()), ("max", ()),
    }  # fmt: skip
    assert program.done == (0, 1, 3)
    assert [v.aval.shape for v in program.micro.outvars if v.aval.ndim] == [(8, 8), (2, 8)]
    names = [[eqn.primitive.name for eqn in x.eqns] for x in (program.first, program.once)]
    assert "gt" in names[0]
    assert "sqrt" in names[1]
    assert not {"dot_general", "gt"} & {*names[1]}


def test_micro_batches_add_up_to_the_batch() -> None:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    for rows in (1, 2, 4):
        program = divided(rows)
        first = jaxprs.evaluate(program.first, [W, x])
        parts = [
            jaxprs.evaluate(program.micro, [W, x[i : i + rows], *first]) for i in range(0, 8, rows)
        ]
        crossing = [
            getattr(np, each.how)([part[i] for part in parts], axis=0)
            for i, each in enumerate(program.crossing)
        ]
        done = jaxprs.evaluate(program.once, [W, None, *first, *crossing])
        want = step(W, x)
        for i, value in zip(program.done, done, strict=True):
            np.testing.assert_allclose(value, want[i], 1e-5, 1e-5)
