"""fp16 with parameters that are used more than once: a step that overflows changes nothing."""

from typing import Any

import jax
import numpy as np
import pytest
from equal import arguments, host, start, taken_apart, zero_for
from programs import PROGRAMS, Kind
from programs.reused import PROGRAMS as REUSED

from zerojax.plan import rule

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.sweep]
OPTIONS: dict[str, Any] = {"fp16": True, "initial_scale_power": 4, "hysteresis": 1}


def run(name: str, stage: int, k: int) -> tuple[list[float], list[Any]]:
    """Losses and parameters of each of three steps; the second batch has an infinite number."""
    program, zero = PROGRAMS[name], zero_for(stage, k, **OPTIONS)
    state, losses, params = start(name, "float32"), [], []
    step = zero(program.step_on(zero) if program.step_on else program.step)
    for i, (batch,) in enumerate(arguments(name, "float32")):
        batch["y"][0, 0] = np.inf if i == 1 else batch["y"][0, 0]
        if program.nnx:
            out = step(*state, batch)
        else:
            state, out = step(state, batch)
        losses.append(float(np.mean(out)))
        params.append(host(taken_apart(program, state)[0]))
    return losses, params


@pytest.mark.parametrize(
    ("name", "k"),
    [
        (program.name, k)
        for i, program in enumerate(REUSED)
        for k in ((1, 4) if program.accumulated.kind is Kind.EQUAL else (1,))
        if k == 4 or i % 2 == 0
    ],
)
def test_fp16_skips(name: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at stage 0."""
    monkeypatch.setattr(rule, "SMALL", 0)
    losses, params = run(name, 3, k)
    want_losses, want = run(name, 0, k)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-2)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-3, atol=3e-3)
    jax.tree.map(np.testing.assert_array_equal, params[1], params[0])
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), params[2], params[1])
    assert any(jax.tree.leaves(moved))
