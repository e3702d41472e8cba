"""Distillation at toy size: it runs with either teacher, which stays frozen, and its loss falls."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import zerojax
from examples import distill

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_it_prints_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = distill.gpt(layers=3, width=32)  # of teacher and student: programs are compiled once
    monkeypatch.setattr(distill, "gpt", lambda layers, width: model)
    monkeypatch.setattr(distill, "BLOCK", 16)
    states, trained = list[Any](), distill.trained

    def recorded(*how: Any) -> Any:
        states.append(trained(*how))
        return states[-1]

    monkeypatch.setattr(distill, "trained", recorded)
    options = ["--teacher", "int8", "--teacher_steps", "20", "--steps", "20"]
    result = CliRunner().invoke(distill.app, options, catch_exceptions=False)
    pattern = r"held-out loss: teacher (.*), student (.*), distilled (.*)\n"
    losses = re.fullmatch(pattern, result.output)
    assert losses is not None, result.output
    assert all(float(loss) < math.log(256) for loss in losses.groups())

    taught, _, student = states
    frozen = zerojax.quantize_weights(taught.params)
    jax.tree.map(np.testing.assert_array_equal, student.teacher, frozen)

    @jax.jit
    def loss(params: Any, frozen: Any) -> jax.Array:
        tokens = jnp.arange(32, 32 + 64).reshape(4, 16)
        said, wanted = (
            model.apply({"params": x}, tokens) for x in (params, zerojax.dequantize(frozen))
        )
        return zerojax.distillation_loss(said, wanted, temperature=1.0).mean()

    start = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    assert loss(student.params, frozen) < 0.9 * loss(start, frozen)
