"""The trajectories recorded from DeepSpeed itself, step for step."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.training.train_state import TrainState

import zerojax
from examples.gpt import GPT, loss_fn
from examples.hf_gpt2 import config_from_hf, load

PEERS = Path(__file__).parent.parent.parent / "shared" / "peers"
# Relative, of the loss at every step.
LOSS = {
    "fp32_zero2_adamw_clip": 2e-4,
    "fp16_overflow_warmup": 1e-3,
    "bf16_zero2_adamw_clip": 1e-2,
}

pytestmark = pytest.mark.skipif(not PEERS.exists(), reason=f"no records at {PEERS}")


def follow(config: dict[str, Any], devices: int) -> list[dict[str, float]]:
    """Trains on the recorded batches from the recorded weights."""
    zero = zerojax.zero(config, mesh=zerojax.mesh(devices))
    model_config = config_from_hf(json.loads((PEERS / "gpt2_tiny_config.json").read_text()))
    model = GPT(model_config)
    params = load(PEERS / "gpt2_tiny.safetensors", model_config)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=zero.optimizer())

    @zero
    def train_step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens)
            return loss_fn(logits[:, :-1], tokens[:, 1:])

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    rows = []
    for tokens in np.load(PEERS / "tokens.npy"):
        scale = float(zerojax.telemetry(state)["loss_scale"])
        state, loss = train_step(state, tokens)
        told = {name: float(value) for name, value in zerojax.telemetry(state).items()}
        rows.append(told | {"loss": float(loss), "loss_scale_used": scale})
    return rows


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", LOSS)
def test_the_record_is_reproduced(name: str, stage: int, devices: int) -> None:
    record = json.loads((PEERS / f"{name}.json").read_text())
    assert len(record["rows"]) == 30
    config = record["config"]
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    for got, want in zip(follow(config, devices), record["rows"], strict=True):
        where = f"step {want['step']}"
        assert got["loss"] == pytest.approx(want["loss"], rel=LOSS[name]), where
        assert abs(got["learning_rate"] - want["lr_used"]) < 1e-9, where
        assert got["loss_scale_used"] == want["loss_scale_used"], where
        assert got["skipped_steps"] == want["skipped_total"], where
        assert got["step"] == want["step"] + 1
        if name.startswith("fp32"):
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3), where
        assert np.isfinite(got["grad_norm"]) == np.isfinite(want["grad_norm"]), where
