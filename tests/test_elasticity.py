"""A run goes on with fewer and with more devices, at the same batch."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from equal import arguments, start
from programs import PROGRAMS

import zerojax
from zerojax.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compile")

CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 32,
        "micro_batch_sizes": [1, 2, 4],
        "max_gpus": 8,
    },
}
# Micro-batch and accumulation on so many devices.
SIZES = {8: (1, 3), 4: (2, 3), 6: (4, 1)}


@pytest.mark.slow
def test_the_losses_are_those_of_a_run_that_never_changed(tmp_path: Path) -> None:
    program = PROGRAMS["mlp"]
    with jax.enable_x64(True):
        batches = [batch for batch, *_ in arguments("mlp", "float64", 6, rows=24)]

        def go_on(devices: int, first: int, last: int) -> list[float]:
            """The losses from one step to another, from the last checkpoint to the next."""
            zero = zerojax.zero(CONFIG, mesh=zerojax.mesh(devices))
            assert zero.config.batch(devices) == (24, *SIZES[devices])
            create: Any = lambda: start("mlp", "float64")  # noqa: E731
            step, losses = zero(program.step), []
            with Checkpointer(tmp_path, zero) as checkpointer:
                state = zero.init(create)
                if first:
                    state = checkpointer.restore(zero.abstract_state(create))
                for batch in batches[first:last]:
                    state, metrics = step(state, batch)
                    losses.append(float(metrics["loss"]))
                if last < 6:
                    checkpointer.save(last, state)
            return losses

        changed = go_on(8, 0, 2) + go_on(4, 2, 4) + go_on(6, 4, 6)
        np.testing.assert_allclose(changed, go_on(8, 0, 6), rtol=1e-9)


def test_a_number_that_does_not_share_the_batch_is_refused_at_once() -> None:
    with pytest.raises(zerojax.ConfigError, match=r"24 rows is not for 5 .* take 4 or 6, as"):
        zerojax.zero(CONFIG, mesh=zerojax.mesh(5))


def test_the_plan_says_what_was_resolved() -> None:
    zero = zerojax.zero(CONFIG)
    state = zero.abstract_state(PROGRAMS["mlp"].create, jax.random.key(0))
    says = "elasticity = 24 (resolved: rows per update, on 1, 2, 3, 4, 6, 8 data-parallel devices)"
    assert says in str(zero.plan(state)).splitlines()
