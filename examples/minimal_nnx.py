"""An NNX model trained with ZeRO stage 3: which of 32 numbers is the largest?

Command: `python examples/minimal_nnx.py` (10 s on 2 CPU cores). It ends with

    step 100  loss 0.65

from 3.5 (ln 32) at the start, on any number of devices.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import zerojax

zerojax.init_distributed()  # one of several processes, where it was launched as such
if not jax.distributed.is_initialized():
    jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator

zero = zerojax.zero(stage=3, bf16=True)  # or the path of a DeepSpeed JSON


class MLP(nnx.Module):
    """Numbers [rows, 32] to logits [rows, 32]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(32, 512, rngs=rngs)
        self.middle = nnx.Linear(512, 512, rngs=rngs)
        self.down = nnx.Linear(512, 32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.middle(nnx.relu(self.up(x)))))


def create_model() -> tuple[MLP, nnx.Optimizer]:
    model = MLP(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@zero
def train_step(model: MLP, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> jax.Array:
    def loss_fn(model: MLP) -> jax.Array:
        logits = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


model, optimizer = zero.init(create_model)  # sharded from the start
say = print if jax.process_index() == 0 else lambda *_: None  # once for all processes
say(zero.plan(model, optimizer))  # what each device holds, and why
rng = np.random.default_rng(0)
for step in range(1, 101):
    x = rng.normal(size=(256, 32)).astype(np.float32)[zerojax.process_rows(256)]
    loss = train_step(model, optimizer, {"x": x, "y": x.argmax(axis=-1)})
    if step % 10 == 0:
        say(f"step {step:3}  loss {loss:.2f}")
