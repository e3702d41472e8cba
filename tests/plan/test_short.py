"""The short tables that objects have as their repr."""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax


def create(layers: int = 30, others: int = 30) -> TrainState:
    blocks = {f"block_{i}": {"w": jnp.zeros((256, 512))} for i in range(layers)}
    shapes = {f"x{chr(97 + i)}": jnp.zeros((8, i + 1)) for i in range(min(others, 26))}
    params = {**blocks, **shapes}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def test_a_plan_has_equal_layers_as_one_row_and_counts_the_rest() -> None:
    plan = zerojax.zero(stage=3).plan(jax.eval_shape(create))
    lines = repr(plan).splitlines()
    assert len(lines) <= 25
    (layers,) = [line for line in lines if "params['block_*']['w']" in line]
    assert layers.split()[1:4] == ["30", "256x512", "float32"]
    assert "  ... 17 more rows" in lines  # 1 + 26 rows, of which 10 are shown
    assert len(str(plan).splitlines()) > 56
