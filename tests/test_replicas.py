"""Replica groups: the batch lies over "replica" and "data", the state over "data" alone."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES
from test_equality import assert_equal_runs, follow, plain, start

import zerojax
from zerojax.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64")

MESHES = ({"replica": 2, "data": 4}, {"replica": 4, "data": 2})
# The sweep has all of these, at every stage on both meshes.
NAMES = ("mlp", "gpt_scan_remat", "convnet", "tied", "odd", "masked", "nnx_mlp", "nnx_gpt")
COMMON = {("mlp", stage, 1, 0) for stage in range(4)} | {
    ("mlp", 2, 4, 0), ("mlp", 3, 4, 1), ("gpt_scan_remat", 3, 1, 1)
}  # fmt: skip


def zero_for(axes: dict[str, int], stage: int, **keywords: Any) -> zerojax.Zero:
    keywords = {"stage3_param_persistence_threshold": 0} | keywords
    return zerojax.zero(stage=stage, mesh=zerojax.mesh(axes=axes), **keywords)


def follows_plain(zero: zerojax.Zero, name: str) -> None:
    got = follow(name, zero(CASES[name].step), start(name, "float64"), "float64")
    want = plain(name, "float64")
    if zero.config.gradient_accumulation_steps in (None, 1):
        assert_equal_runs(got, want, "float64")
    else:  # metrics of a row each come stacked
        assert_equal_runs((got[0], {}, *got[2:]), (want[0], {}, *want[2:]), "float64")


@pytest.mark.parametrize(
    ("name", "stage", "accumulation", "mesh"),
    [
        pytest.param(*case, marks=() if case in COMMON else pytest.mark.sweep)
        for name in NAMES
        for stage in range(4)
        for accumulation in (1, 4)
        for mesh in (0, 1)
        if accumulation == 1 or CASES[name].averages
        for case in [(name, stage, accumulation, mesh)]
    ],
)
def test_a_step_computes_what_the_plain_one_computes(
    name: str, stage: int, accumulation: int, mesh: int
) -> None:
    follows_plain(zero_for(MESHES[mesh], stage, gradient_accumulation_steps=accumulation), name)
