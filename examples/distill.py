"""A small GPT learns from a larger one, at ZeRO stage 3: knowledge distillation.

Command, from the repository root::

    python -m examples.distill                     # 224 CPU seconds, on 2 shared cores 8 minutes
    python -m examples.distill --teacher int8      # the frozen teacher as int8 codes and scales

The teacher trains on the Python library's own sources, byte by byte. The student has a fifth of its
parameters and 3% of the text. It trains twice, with the same seed, batches and steps: on the
text, and on the teacher's logits of that text, which tell it what else could follow (Hinton et al.
2015, https://arxiv.org/abs/1503.02531, section 6). Nats a byte on text that no model has seen:

    held-out loss: teacher 2.24, student 2.45, distilled 2.37
"""

import enum
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax.training.train_state import TrainState

import zerojax
from examples.command import Command, command
from examples.run_clm import data
from zerojax.models.gpt import GPT, GPTConfig

ROWS, BLOCK, SHARE = 32, 64, 0.03
Batch = dict[str, Any]
"""{"tokens": int [rows, BLOCK + 1]}."""

app = typer.Typer(add_completion=False)


class Precision(enum.StrEnum):
    fp32 = "fp32"
    int8 = "int8"


class State(TrainState):
    """A state with the parameters of a frozen teacher, or None; stage 3 shards both."""

    teacher: Any


def gpt(layers: int, width: int) -> GPT:
    config = GPTConfig(
        vocab_size=256,
        block_size=BLOCK,
        n_layer=layers,
        n_head=width // 32,
        n_embd=width,
        scan=True,
    )
    return GPT(config)


def trained(
    zero: zerojax.Zero,
    model: GPT,
    stream: data.Tokens,
    steps: int,
    teacher: GPT | None = None,
    frozen: Any = None,
) -> State:
    """Returns the state of a model after its training, on a teacher's logits if there is one."""
    rate = optax.warmup_cosine_decay_schedule(0, 2e-3, min(20, steps // 2), steps)

    def create_state(key: jax.Array, frozen: Any) -> State:
        params = model.init(key, jnp.zeros((1, BLOCK), jnp.int32))["params"]
        return State.create(
            apply_fn=model.apply, params=params, tx=optax.adamw(rate), teacher=frozen
        )

    @zero
    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(params: Any) -> jax.Array:
            variables = {"params": params}
            if teacher is None:
                return state.apply_fn(variables, inputs, targets=targets).mean()
            logits = state.apply_fn(variables, inputs)
            taught: Any = teacher.apply({"params": zerojax.dequantize(state.teacher)}, inputs)
            return zerojax.distillation_loss(
                logits, taught, targets, temperature=1.0, hard_weight=0.1
            ).mean()

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = zero.init(create_state, jax.random.key(0), frozen)
    batches = data.Batches(stream, ROWS, BLOCK)
    for step in range(steps):
        state, _ = train_step(state, batches.batch_at(step))
    return state


def held_out(zero: zerojax.Zero, state: State, text: data.Text) -> float:
    """Returns the mean loss on windows of the held-out text."""

    @zero.evaluate
    def evaluate(state: State, batch: Batch) -> jax.Array:
        tokens = batch["tokens"]
        variables = {"params": state.params}
        return state.apply_fn(variables, tokens[:, :-1], targets=tokens[:, 1:]).mean()

    batches = data.Batches(text.held_out, 2 * ROWS, BLOCK).spread(8)
    return float(np.mean([evaluate(state, batch) for batch in batches]))


@app.command(cls=Command, help="Distill a small GPT from a larger one.")
def main(
    teacher: Annotated[Precision, typer.Option(help="how the teacher is kept")] = Precision.fp32,
    teacher_steps: Annotated[int, typer.Option(min=2, help="updates of the teacher")] = 400,
    steps: Annotated[int, typer.Option(min=2, help="updates of the student")] = 300,
) -> None:
    with command(ValueError) as console:
        zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
        text = data.split(data.python_sources(2_000_000), BLOCK)
        few = text.train[: int(SHARE * len(text.train))]
        large, small = gpt(layers=3, width=128), gpt(layers=2, width=64)
        taught = trained(zero, large, text.train, teacher_steps)
        is_int8 = teacher is Precision.int8
        frozen = zerojax.quantize_weights(taught.params) if is_int8 else taught.params
        alone = trained(zero, small, few, steps)
        distilled = trained(zero, small, few, steps, large, frozen)
        losses = [held_out(zero, state, text) for state in (taught, alone, distilled)]
        console.print(
            "held-out loss: teacher {:.2f}, student {:.2f}, distilled {:.2f}".format(*losses)
        )


if __name__ == "__main__":
    app()
