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


def test_silent_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    decorated = zerojax.zero({"zero_optimization": {"stage": 1}})(step)
    state = start()
    with caplog.at_level(logging.INFO, "zerojax"):
        for batch in batches(3):
            state, _ = decorated(state, batch)
    assert not caplog.records


def run_with_a_bad_batch(zero: zerojax.Zero, bad: float = np.nan) -> tuple[TrainState, Any]:
    """Five steps, the third with a row that is not finite, and a further look at them."""
    decorated, state = zero(step), zero.init(start)
    for at, batch in enumerate(batches(5), 1):
        if at == 3:
            batch["x"][5, 0] = bad
        state, _ = decorated(state, batch)
    decorated.close()
    return state, decorated


SETTINGS: list[dict[str, Any]] = [
    {"stage": 2, "gradient_accumulation_steps": 2},
    {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "bf16": True},
]


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("keywords", SETTINGS, ids=str)
def test_the_first_step_that_is_not_finite_is_named_once(
    caplog: pytest.LogCaptureFixture, keywords: dict[str, Any]
) -> None:
    run_with_a_bad_batch(zerojax.zero(**keywords))
    (record,) = [r for r in caplog.records if r.name == "zerojax"]
    said = record.getMessage()
    assert said.startswith("step 3: grad_norm, acc/top1, loss are no longer finite")
    for remedy in ("batch of that step", "lower the learning rate", "check_finite=True"):
        assert remedy in said


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("keywords", SETTINGS, ids=str)
def test_check_finite_skips_such_a_step(
    caplog: pytest.LogCaptureFixture, keywords: dict[str, Any]
) -> None:
    zero = zerojax.zero(**keywords, check_finite=True)
    state, decorated = run_with_a_bad_batch(zero, np.inf)
    want = zero.init(start)
    for at, batch in enumerate(batches(5), 1):
        if at != 3:
            want, _ = decorated(want, batch)
    np.testing.assert_array_equal(state.params["w"], want.params["w"])
    told = zerojax.telemetry(state)
    assert (told["skipped_steps"], told["step"]) == (1, 5)
    assert "finite" not in caplog.text


def test_check_finite_stands_beside_a_config() -> None:
    zero = zerojax.zero({"bf16": {"enabled": True, "check_grad_overflow": False}})
    assert not zero.config.skips_overflow
    assert zerojax.zero(zero.config, check_finite=True).config.skips_overflow
    both = zerojax.zero({"check_finite": True}, check_finite=False)
    assert not both.config.skips_overflow
    assert "check_finite" not in [note.key for note in both.config.notes]
    assert zerojax.zero({"check_finite": True}).config.skips_overflow
    with pytest.raises(zerojax.ConfigError, match="check_finite: expected true or false"):
        zerojax.zero(stage=1, check_finite="maybe")  # type: ignore[arg-type]


@pytest.mark.usefixtures("quick_compile")
def test_a_dict_in_bf16_skips_such_steps_as_deepspeed_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zero = zerojax.zero({"bf16": {"enabled": True}})
    state, _ = run_with_a_bad_batch(zero)
    assert zerojax.telemetry(state)["skipped_steps"] == 1
    assert "bf16.check_grad_overflow = True (default: DeepSpeed skips" in str(zero.plan(state))


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
