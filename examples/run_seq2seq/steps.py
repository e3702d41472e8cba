"""The training step, and the beam search of an evaluation.

Example::

    train_step, write = zero(step_of(model)), zero.evaluate(search_of(model, options))
    state, loss = train_step(state, batch, key)
    targets = write(state, batch)                              # int32 [B, written_length]
"""

from collections.abc import Callable
from typing import Any

import jax
from flax.training.train_state import TrainState

import zerojax
from examples.run_seq2seq.options import Options
from zerojax.generation.beam_search import generate
from zerojax.models.bart import Bart, shifted

Batch = dict[str, jax.Array]


def step_of(model: Bart) -> Callable[..., tuple[TrainState, jax.Array]]:
    """A step whose loss is the mean cross-entropy of all labels that are no padding, in nats."""

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, jax.Array]:
        labels = batch["labels"]
        rngs = {"dropout": jax.random.fold_in(key, state.step)}

        def loss_fn(params: Any) -> jax.Array:
            losses: Any = state.apply_fn(
                {"params": params}, batch["input_ids"], shifted(labels, model.config),
                batch["attention_mask"], targets=labels, deterministic=False, rngs=rngs,
            )  # fmt: skip
            return zerojax.weighted_mean(losses, labels != model.config.pad_token_id)

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def search_of(model: Bart, options: Options) -> Callable[[TrainState, Batch], jax.Array]:
    """The targets int [B, written_length] of a batch, by beam search."""

    def write(state: TrainState, batch: Batch) -> jax.Array:
        targets, _ = generate(
            model, {"params": state.params}, batch["input_ids"], batch["attention_mask"],
            num_beams=options.num_beams, min_length=options.val_min_target_length,
            max_length=options.written_length,
        )  # fmt: skip
        return targets

    return write
