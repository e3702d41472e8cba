"""The short tables that objects have as their repr."""

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.optim.telemetry import Telemetry


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


def test_telemetry_is_a_dict_to_jax_too() -> None:
    figures = Telemetry(step=jnp.asarray(3), grad_norm=jnp.asarray(0.25))
    assert [line.split() for line in repr(figures).splitlines()[1:]] == [
        ["step", "3"],
        ["grad_norm", "0.25"],
    ]
    doubled = jax.tree.map(lambda x: 2 * x, figures)
    assert type(doubled) is Telemetry
    assert {name: float(x) for name, x in doubled.items()} == {"step": 6, "grad_norm": 0.5}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(figures)]
    assert paths == ["['grad_norm']", "['step']"]
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(lambda: figures))
