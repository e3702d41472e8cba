"""A Trainer with pipeline stages: its losses, evaluations, and a run that goes on elsewhere."""

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from trainer.jobs import POINTS

import zerojax
from zerojax.trainer import TrainerCallback, classification_loss

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.slow]


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + nn.Dense(8)(nn.tanh(x)), None


class Layers(nn.Module):
    """x [rows, 8] to logits [rows, 4]."""

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(4)(layers(name="layers")(x, None)[0])


class Stop(TrainerCallback):
    """Ends a run after two updates."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def trained(folder: Path, stages: int, *callbacks: TrainerCallback, **how: Any) -> Any:
    """Trains for four updates of 16 rows, with evaluations on 19 rows and saves after two.
    Returns the losses by step and name."""
    zero: dict[str, Any] = {"zero_optimization": {"stage": 1}, "pipeline": {"stages": stages}}
    args = zerojax.TrainingArguments(
        str(folder), per_device_train_batch_size=stages, gradient_accumulation_steps=2,
        per_device_eval_batch_size=1, deepspeed=zero, max_steps=4, learning_rate=0.1,
        eval_strategy="steps", eval_steps=2, save_steps=2, logging_steps=1,
    )  # fmt: skip
    trainer = zerojax.Trainer(
        Layers(), args, train_dataset=POINTS, eval_dataset=POINTS[:19], loss=classification_loss,
        callbacks=callbacks,
    )  # fmt: skip
    trainer.train(**how)
    assert trainer.zero.mesh.shape.get("stage", 1) == stages
    names = "loss", "eval_loss"
    logs = trainer.state.log_history
    return {(log["step"], name): log[name] for log in logs for name in names if name in log}


def test_a_run_goes_on_with_other_stages_and_has_the_numbers_without(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", 1)
    first = trained(tmp_path / "stages", 2, Stop())
    found = first | trained(tmp_path / "stages", 4, resume_from_checkpoint=True)
    assert len(first) == 3
    assert found.keys() == plain.keys()
    values = [found[key] for key in plain]
    np.testing.assert_allclose(values, [*plain.values()], rtol=1e-5)
