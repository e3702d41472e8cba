"""DeepSpeed's own trajectories, followed step for step.

    python -m benchmarks.peers                    # two to five minutes on two cores
    python -m benchmarks.peers --json records/peers.json

``tests/data/peers`` holds runs of the real DeepSpeed 0.19.8: a config, and for each of 30 steps the
loss, learning rate, loss scale, gradient norm before clipping and the skipped total, from given
weights (a small GPT-2) and batches. Each is trained here at every stage on 1 and on 8 virtual
devices; the table shows the largest distance from the record.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState

import zerojax
from benchmarks.frame import Answer, Table, question, say
from zerojax.models.gpt import GPT, loss_fn
from zerojax.models.hugging_face.gpt2 import config_from_hf, load

PEERS = Path(__file__).parents[1] / "tests" / "data" / "peers"
RECORDS = ("fp32_zero2_adamw_clip", "fp16_overflow_warmup", "bf16_zero2_adamw_clip")
STAGES, DEVICES = (0, 1, 2, 3), (1, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance of a run from its record, at the step where it is largest.

    Attributes:
      loss, grad_norm: relative distances; that of the norm over steps where both are finite.
      learning_rate: the absolute distance.
      loss_scales, skipped: the number of steps at which they are not equal.
    """

    record: str
    stage: int
    devices: int
    loss: float
    grad_norm: float
    learning_rate: float
    loss_scales: int
    skipped: int


def follow(config: dict[str, Any], devices: int) -> list[dict[str, float]]:
    """Trains on the recorded batches from the recorded weights; a row for each step."""
    zero = zerojax.zero(config, mesh=zerojax.mesh(devices))
    model_config = config_from_hf(json.loads((PEERS / "gpt2_tiny_config.json").read_text()))
    model = GPT(model_config)
    params = load(PEERS / "gpt2_tiny.safetensors", model_config)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=zero.optimizer())

    @zero
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens)
            return loss_fn(logits[:, :-1], tokens[:, 1:])

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    rows = []
    for tokens in np.load(PEERS / "tokens.npy"):
        scale = float(zerojax.telemetry(state)["loss_scale"])
        state, value = train_step(state, tokens)
        figures = {name: float(x) for name, x in zerojax.telemetry(state).items()}
        rows.append(figures | {"loss": float(value), "loss_scale": scale})
    return rows


def distance(record: str, stage: int, devices: int) -> Distance:
    """Follows a record at a stage of our choice."""
    trajectory = json.loads((PEERS / f"{record}.json").read_text())
    config = trajectory["config"]
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    pairs = list(zip(follow(config, devices), trajectory["rows"], strict=True))
    norms = [(got["grad_norm"], want["grad_norm"]) for got, want in pairs]
    return Distance(
        record=record,
        stage=stage,
        devices=devices,
        loss=max(abs(got["loss"] / want["loss"] - 1) for got, want in pairs),
        grad_norm=max(abs(a / b - 1) for a, b in norms if math.isfinite(a) and math.isfinite(b)),
        learning_rate=max(abs(got["learning_rate"] - want["lr_used"]) for got, want in pairs),
        loss_scales=sum(got["loss_scale"] != want["loss_scale_used"] for got, want in pairs),
        skipped=sum(got["skipped_steps"] != want["skipped_total"] for got, want in pairs),
    )


def table(distances: Sequence[Distance]) -> list[list[str]]:
    """Headings, and a row for each run."""
    rows = [["record", "stage", "devices", "loss", "gradient norm", "learning rate",
             "loss scales off", "skipped off"]]  # fmt: skip
    for each in distances:
        far = (f"{x:.1e}" for x in (each.loss, each.grad_norm, each.learning_rate))
        counts = map(str, (each.loss_scales, each.skipped))
        rows.append([each.record, str(each.stage), str(each.devices), *far, *counts])
    return rows


@question("peers", "DeepSpeed's own trajectories, followed")
def main(options: argparse.Namespace) -> Answer:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    distances = []
    for record in RECORDS:
        for stage in STAGES:
            for n in DEVICES:
                say(f"following {record} at stage {stage} on {n} devices")
                distances.append(distance(record, stage, n))
    title = "Largest distance from DeepSpeed's record over 30 steps"
    return Answer({"runs": distances}, [Table(table(distances), title=title)])


if __name__ == "__main__":
    main()
