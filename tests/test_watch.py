"""What a decorated step logs, and that it waits for the device only where it must."""

import csv
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

ROWS = 16


def step(state: TrainState, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        error = batch["x"].astype(params["w"].dtype) @ params["w"] - 1
        return jnp.mean(error.astype(jnp.float32) ** 2)

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {"loss": value, "acc": {"top1": value * 0 + 0.5}}


def start() -> TrainState:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(0.1))


def batches(n: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(ROWS, 8)).astype(np.float32)} for _ in range(n)]


def rows(path: Path) -> list[tuple[int, float]]:
    with path.open() as file:
        return [(int(at), float(value)) for at, value in list(csv.reader(file))[1:]]


def test_metrics_go_to_csv_under_deepspeeds_tags(tmp_path: Path) -> None:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 4},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
    }
    decorated = zerojax.zero(config)(step)
    state, want = start(), []
    for at, batch in enumerate(batches(4), 1):
        if at == 3:
            batch["x"][5, 0] = np.inf
        state, out = decorated(state, batch)
        told = {name: float(value) for name, value in zerojax.telemetry(state).items()}
        want.append({"train_loss": float(out["loss"]), **told})
    decorated.close()
    job = tmp_path / "job"
    for name, of in (("train_loss", "train_loss"), ("grad_norm", "grad_norm"),
                     ("loss_scale", "loss_scale")):  # fmt: skip
        got = rows(job / f"Train_Samples_{name}.csv")
        assert [at for at, _ in got] == [ROWS * (i + 1) for i in range(4)]
        np.testing.assert_allclose([value for _, value in got], [w[of] for w in want], rtol=1e-6)
    assert math.isinf(want[2]["grad_norm"])
    assert want[3]["skipped_steps"] == 1
    assert rows(job / "Train_Samples_acc_top1.csv")[0] == (ROWS, 0.5)


def test_lines_and_times(caplog: pytest.LogCaptureFixture) -> None:
    decorated = zerojax.zero(stage=1, steps_per_print=2, wall_clock_breakdown=True)(step)
    state = start()
    with caplog.at_level(logging.INFO, "zerojax"):
        for batch in batches(5):
            state, _ = decorated(state, batch)
    lines = [r.getMessage() for r in caplog.records]
    printed = [line.split(",")[0] for line in lines if line.startswith("step=")]
    assert printed == ["step=2", "step=4"]
    times = [line for line in lines if line.startswith("time (ms)")]
    assert len(times) == 3
    assert "compilation included" in times[0]
    assert all("batch:" in line and "step:" in line for line in times)


def test_silent_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    decorated = zerojax.zero({"zero_optimization": {"stage": 1}})(step)
    state = start()
    with caplog.at_level(logging.INFO, "zerojax"):
        for batch in batches(3):
            state, _ = decorated(state, batch)
    assert not caplog.records


def test_what_is_missing_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb"):
        zerojax.zero(stage=1, wandb={"project": "p"})(step)


def test_an_unwritable_folder_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    zero = zerojax.zero(stage=1, csv_monitor={"output_path": str(tmp_path / "file")})
    state = start()
    with pytest.raises(OSError, match="file"):
        zero(step)(state, batches(1)[0])
    assert state.params["w"].sum() == 8


def test_an_optimizer_and_a_schedule_without_effect_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    for config, what in (
        ({"scheduler": warm_up}, r"scheduler (WarmupLR) has no effect"),
        ({"optimizer": {"type": "Lion"}, "scheduler": warm_up}, "optimizer (Lion) and scheduler"),
    ):
        caplog.clear()
        zerojax.zero(config)(step)(start(), batches(1)[0])
        assert what in caplog.text
