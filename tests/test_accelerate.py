"""A run by Accelerate's YAML has the numbers of the same run by the equal JSON."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.training.train_state import TrainState

import zerojax

YAML = """
distributed_type: DEEPSPEED
mixed_precision: fp16
num_processes: 8
deepspeed_config:
  deepspeed_config_file: ds.json
  gradient_accumulation_steps: 2
  gradient_clipping: 0.05
  zero_stage: 3
"""
IN_JSON = """{
  "zero_optimization": {"stage": "auto", "stage3_param_persistence_threshold": 0},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
  "gradient_clipping": "auto"
}"""
SAME = {
    "fp16": {"enabled": True, "auto_cast": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
}


def run(config: Any) -> tuple[list[float], Any]:
    zero = zerojax.zero(config, auto={"optimizer.params.lr": 1e-2})

    def create(key: jax.Array) -> TrainState:
        params = {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}
        return TrainState.create(apply_fn=None, params=params, tx=zero.optimizer())

    @zero
    def step(state: TrainState, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            out = batch["x"] @ params["w"] + params["b"]
            return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state, losses = zero.init(create, jax.random.key(0)), []
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = {
            "x": rng.normal(size=(16, 16)).astype(np.float32),
            "y": rng.normal(size=(16, 8)).astype(np.float32),
        }
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_the_yaml_trains_as_the_json(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(IN_JSON)
    (tmp_path / "default_config.yaml").write_text(YAML)
    losses, params = run(tmp_path / "default_config.yaml")
    expected, same = run(SAME)
    assert losses == expected
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert losses[-1] != losses[0]
