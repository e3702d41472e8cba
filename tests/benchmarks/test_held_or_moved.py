"""What is neither held nor moved without need: figures within 5% of their theory."""

import jax
import pytest

from benchmarks.compiled import Cost
from benchmarks.held_or_moved import (
    FIGURES,
    HEADS,
    WITHIN,
    Claim,
    claims,
    cost_of,
    row,
)
from benchmarks.moved_programs import Language

IN_SECONDS = ("eight tables", "a head in float32")
RECORDED = {
    "tied GPT, unrolled, 8 micro-batches", "tied GPT, unrolled, 8 micro-batches, bf16 only by flax"
}  # fmt: skip
"""Slow to compile, and like others: scanned, or unrolled with 4 micro-batches."""


def parameter(claim: Claim) -> object:
    marks = [] if claim.program.name in IN_SECONDS else [pytest.mark.sweep]
    return pytest.param(claim, marks=marks, id=claim.name)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize(
    "claim", [parameter(each) for each in claims() if each.program.name not in RECORDED]
)
def test_theory(claim: Claim) -> None:
    cost = cost_of(claim)
    assert claim.found(cost) == pytest.approx(claim.theory, rel=WITHIN)
    # What is all-reduced are norms, vectors and what is replicated by the config.
    assert cost.units.get("all-reduce", 0) < 0.01
    assert cost.units.get("all-to-all", 0) < 1e-9


def test_a_theory_that_is_missed_is_in_bold() -> None:
    claim = next(each for each in claims() if each.figure == "MB sent")
    cost = Cost(
        name="tables",
        stage=3,
        devices=8,
        arrays=1_000_000,
        units={"all-gather": 5.0, "reduce-scatter": 5.0},
        moved_bytes=0,
        argument_bytes=2_000_000,
        temporary_bytes=1_000_000,
        seconds=1.0,
    )
    assert {name: of(cost) for name, of in FIGURES.items()} == {
        "units sent": 10,
        "units gathered": 5,
        "units reduced": 5,
        "MB sent": 20,
        "MB at rest": 2,
        "MB of temporaries": 1,
    }
    said = dict(zip(HEADS, row(claim, cost), strict=True))
    assert said["compiled"] == "20.00"
    assert said["off"].startswith("**-")


def test_parameters_are_counted_without_a_trace() -> None:
    sizes = Language(layers=2, width=128, vocabulary=500, tokens=64)
    params = jax.eval_shape(sizes.create, jax.random.key(0)).params
    assert sizes.parameters == sum(x.size for x in jax.tree.leaves(params))
