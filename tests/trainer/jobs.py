"""Small models and data of the Trainer's tests, and a process that is killed."""

import hashlib
import os
import pathlib
import signal
import sys
from typing import Any

import flax.linen as nn
import jax
import numpy as np

import zerojax
from zerojax.models.gpt import GPTConfig
from zerojax.trainer import TrainerCallback, classification_loss

CONFIG = GPTConfig(vocab_size=64, block_size=16, n_layer=1, n_head=2, n_embd=32)
_RNG = np.random.default_rng(0)
TOKENS = [{"input_ids": _RNG.integers(0, 64, 12).astype(np.int32), "text": "t"} for _ in range(75)]
_X = _RNG.normal(size=(75, 8)).astype(np.float32)
POINTS = [{"x": x, "label": int(x[:4].argmax())} for x in _X]


class Classifier(nn.Module):
    """x [rows, 8] to logits [rows, 4]."""

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=deterministic)(x))


def digest(trainer: zerojax.Trainer) -> str:
    """Of every array of the state, the optimizer's among them."""
    text = hashlib.sha256()
    for x in jax.tree.leaves(trainer.train_state):
        text.update(np.asarray(x).tobytes())
    return text.hexdigest()


class Kill(TrainerCallback):
    """SIGKILL after five updates, once the save of four is on disk."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            folder = pathlib.Path(args.output_dir, "checkpoints", "4")
            while not folder.exists():
                pass
            os.kill(os.getpid(), signal.SIGKILL)


def dropout_job(folder: str, **more: Any) -> zerojax.Trainer:
    """Two epochs of five updates of 16 rows with dropout, saved after each second update."""
    arguments: dict[str, Any] = dict(num_train_epochs=2, save_steps=2, logging_steps=3)
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    args = zerojax.TrainingArguments(
        folder, per_device_train_batch_size=2, deepspeed=zero, **arguments
    )
    rows = [*POINTS, *POINTS[:5]]
    return zerojax.Trainer(Classifier(), args, train_dataset=rows, loss=classification_loss, **more)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    dropout_job(sys.argv[1], callbacks=[Kill]).train()
