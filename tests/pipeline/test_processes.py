"""Two processes with one pipeline stage each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from pipeline import models
from pipeline.models import batches

import zerojax
from zerojax.checkpoint import Checkpointer

ROWS = 16

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_processes")


def trained(process: int, folder: str, start: int, steps: int) -> list[float]:
    """Trains one of two processes from a saved step on, and saves after two steps."""
    mesh = zerojax.mesh(axes={"stage": 2, "data": 4})
    assert {device.process_index for device in mesh.devices[process].flat} == {process}
    zero = zerojax.zero(stage=1, gradient_accumulation_steps=4, gradient_clipping=0.0, mesh=mesh)
    step, losses = zero(models.train_step), []
    with Checkpointer(folder, zero) as checkpoints:
        if start:
            state = checkpoints.restore(zero.abstract_state(models.stack), start)
        else:
            state = zero.init(models.stack)
        for i, tokens in enumerate(batches(ROWS, steps)):
            if i < start:
                continue
            state, loss = step(state, tokens[zerojax.process_rows(ROWS, mesh)])
            losses.append(float(loss))
            if i == 1 and not start:
                checkpoints.save(2, state)
    return losses


def trained_twice(process: int, folder: str) -> tuple[list[float], list[float]]:
    first = trained(process, folder, 0, 4)
    jax.clear_caches()
    return first, trained(process, folder, 2, 4)


def test_a_run_that_is_started_again_goes_on_bit_for_bit(
    in_processes: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, again = zip(*in_processes(2, trained_twice, str(tmp_path)), strict=True)
    assert first[0] == first[1]
    assert [run[2:] for run in first] == [*again]
    plain, state = jax.jit(models.train_step), models.stack()
    losses = []
    for tokens in batches(ROWS, 4):
        state, loss = plain(state, tokens)
        losses.append(float(loss))
    np.testing.assert_allclose(first[0], losses, rtol=1e-5)
