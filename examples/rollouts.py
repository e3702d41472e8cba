"""A GPT learns from rewards of the texts that it writes, at ZeRO stage 3: reinforcement learning.

Command, from the repository root::

    python -m examples.rollouts                    # 40 CPU seconds

In each iteration the sharded state writes 8 answers to each of 16 questions (`zerojax.generate`),
the answers are rated, and a step trains on them (`@zero`). The state stays on its devices. An
answer counts on from the last number of its question, modulo 10; its reward is the share of right
tokens. The loss is that of GRPO (Shao et al. 2024, https://arxiv.org/abs/2402.03300) with one
update of each batch, where it is REINFORCE's: the advantage of an answer is its reward, less the
mean and divided by the deviation of the rewards of all answers to its question.

    mean reward: 0.11 at first, at last 0.99
"""

from collections.abc import Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax.training.train_state import TrainState

import zerojax
from examples.command import Command, command
from examples.run_clm.devices import data_mesh
from zerojax.models.gpt import GPT, GPTConfig

NUMBERS, QUESTIONS, ANSWERS = 10, 16, 8
PROMPT, NEW = 4, 6  # tokens
Batch = dict[str, Any]
"""{"tokens": int [rows, PROMPT + NEW], "advantages": fp32 [rows]}; answers to one question are
adjacent."""

app = typer.Typer(add_completion=False)
model = GPT(
    GPTConfig(
        vocab_size=NUMBERS, block_size=PROMPT + NEW, n_layer=2, n_head=2, n_embd=64, scan=True
    )
)


def create_state(key: jax.Array) -> TrainState:
    params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

    def loss_fn(params: Any) -> jax.Array:
        losses = state.apply_fn({"params": params}, inputs, targets=targets)  # -log p(target)
        return (batch["advantages"][:, None] * losses[:, PROMPT - 1 :]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def rate(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rewards of answers, and their advantages, fp32 [rows]."""
    is_right = tokens[:, PROMPT:] == (tokens[:, PROMPT - 1 : -1] + 1) % NUMBERS
    rewards = is_right.mean(1)
    groups = rewards.reshape(-1, ANSWERS)
    deviations = groups - groups.mean(1, keepdims=True)
    advantages = deviations / (groups.std(1, keepdims=True) + 1e-4)
    return rewards, advantages.reshape(-1)


def rewards(zero: zerojax.Zero, iterations: int) -> Iterator[float]:
    """Trains, and yields the mean reward of each iteration."""
    step, state = zero(train_step), zero.init(create_state, jax.random.key(0))
    draw = np.random.default_rng(0)
    for i in range(iterations):
        questions = draw.integers(NUMBERS, size=(QUESTIONS, PROMPT))
        tokens = zerojax.generate(
            model,
            state,
            questions.repeat(ANSWERS, axis=0),
            max_new_tokens=NEW,
            temperature=1.0,
            key=jax.random.key(i),
        )
        reward, advantages = rate(tokens)
        state, _ = step(state, {"tokens": tokens, "advantages": advantages})
        yield float(reward.mean())


@app.command(cls=Command, help="Train a GPT on rewards of its own samples.")
def main(
    iterations: Annotated[int, typer.Option(min=1, help="batches of answers, and updates")] = 60,
) -> None:
    with command(ValueError) as console:
        zero = zerojax.zero(stage=3, mesh=data_mesh(None), stage3_param_persistence_threshold=0)
        history = []
        for i, reward in enumerate(rewards(zero, iterations)):
            history.append(reward)
            if i % 10 == 0:
                console.print(f"iteration {i:3d}  mean reward {reward:.2f}")
        console.print(f"mean reward: {history[0]:.2f} at first, at last {history[-1]:.2f}")


if __name__ == "__main__":
    app()
