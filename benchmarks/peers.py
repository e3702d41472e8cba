"""DeepSpeed's own trajectories, followed step for step.

    python -m benchmarks.peers                    # two to five minutes on two cores
    python -m benchmarks.peers --json records/peers.json

``tests/data/peers`` holds runs of the real DeepSpeed 0.19.8: a config, and for each of 30 steps the
loss, learning rate, loss scale, gradient norm before clipping and the skipped total, from given
weights (a small GPT-2) and batches. Each is trained here at every stage on 1 and on 8 virtual
devices; the table tells the largest distance from the record.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.training.train_state import TrainState
from rich.progress import track
from rich.table import Table

import zerojax
from benchmarks.report import console, write_json
from zerojax.models.gpt import GPT, loss_fn
from zerojax.models.hugging_face.gpt2 import config_from_hf, load

PEERS = Path(__file__).parents[1] / "tests" / "data" / "peers"
RECORDS = ("fp32_zero2_adamw_clip", "fp16_overflow_warmup", "bf16_zero2_adamw_clip")
STAGES, DEVICES = (0, 1, 2, 3), (1, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a run is from its record, at the step where it is furthest.

    Attributes:
      loss, grad_norm: relative; the norm where both are finite.
      learning_rate: absolute.
      loss_scales, skipped: steps at which they are not equal.
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
    def train_step(state: TrainState, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens)
            return loss_fn(logits[:, :-1], tokens[:, 1:])

        value, grads = zerojax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    rows = []
    for tokens in np.load(PEERS / "tokens.npy"):
        scale = float(zerojax.telemetry(state)["loss_scale"])
        state, value = train_step(state, tokens)
        told = {name: float(figure) for name, figure in zerojax.telemetry(state).items()}
        rows.append(told | {"loss": float(value), "loss_scale": scale})
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


def table(distances: list[Distance]) -> Table:
    """A row for each run."""
    rows = Table(title="Largest distance from DeepSpeed's record over 30 steps")
    for name in ("record", "stage", "devices", "loss", "gradient norm", "learning rate",
                 "loss scales off", "skipped off"):  # fmt: skip
        rows.add_column(name, justify="left" if name == "record" else "right")
    for each in distances:
        rows.add_row(
            each.record,
            str(each.stage),
            str(each.devices),
            f"{each.loss:.1e}",
            f"{each.grad_norm:.1e}",
            f"{each.learning_rate:.1e}",
            str(each.loss_scales),
            str(each.skipped),
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="DeepSpeed's trajectories, followed."
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the figures here")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    cases = [(record, stage, n) for record in RECORDS for stage in STAGES for n in DEVICES]
    distances = [distance(*case) for case in track(cases, "following", console=console())]
    console().print(table(distances))
    if options.json:
        write_json(options.json, {"runs": [dataclasses.asdict(each) for each in distances]})


if __name__ == "__main__":
    main()
