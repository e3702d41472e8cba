"""A step on a number of devices that divides nothing computes what the plain one computes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from cases import CASES, Case
from flax import nnx
from test_equality import assert_near, host, start, taken_apart

import zerojax
from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile", "in_float64", "padded_however_small")

STEPS = 6
# Devices, and rows of a batch that divide among them.
DEVICES = {3: 30, 5: 30, 6: 30, 7: 28}
COMMON = {("mlp", 7, 3), ("mlp", 6, 2), ("mlp", 5, 1), ("tied", 5, 3), ("nnx_mlp", 7, 2)} | {
    ("gpt_scan_remat", 7, 3), ("odd", 6, 3),
}  # fmt: skip


@pytest.fixture
def padded_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays, which otherwise stay whole where no dimension divides, are padded too."""
    monkeypatch.setattr(rule, "SMALL", 0)


def follow(case: Case, step: Callable[..., Any], state: Any, rows: int) -> tuple[Any, Any]:
    """Runs a case on the first rows of its batches: losses; parameters and the other state."""

    def first(x: Any) -> Any:
        return x[:rows] if isinstance(x, np.ndarray) and x.ndim else x

    losses = []
    for arguments in case.arguments("float64")[:STEPS]:
        arguments = jax.tree.map(first, arguments)
        if case.nnx:
            metrics = step(*state, *arguments)
        else:
            state, metrics = step(state, *arguments)
        losses.append(float(metrics["loss"]))
    return np.array(losses), tuple(map(host, taken_apart(case, state)))


@pytest.mark.parametrize(
    ("name", "devices", "stage"),
    [
        pytest.param(*each, marks=() if each in COMMON else pytest.mark.sweep)
        for each in ((name, n, stage) for name in CASES for n in DEVICES for stage in (2, 3))
    ]
    + [("mlp", 5, 1)],
)
def test_equal_to_plain_jit(name: str, devices: int, stage: int) -> None:
    case, rows = CASES[name], DEVICES[devices]
    plain = (nnx.jit if case.nnx else jax.jit)(case.step)
    want = follow(case, plain, start(name, "float64"), rows)
    zero = zerojax.zero(
        stage=stage,
        mesh=zerojax.mesh(devices=devices),
        **{"stage3_param_persistence_threshold": 0} if stage == 3 else {},
    )
    state = start(name, "float64")
    plan = zero.plan(*state) if case.nnx else zero.plan(state)
    assert not plan.lost
    got = follow(case, zero(case.step), state, rows)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-9)
    assert_near(got[1], want[1], 1e-9)
