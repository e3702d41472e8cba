"""Steps with the schedule 1F1B against plain jit on one device."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipeline import models
from pipeline.models import batches
from pipeline.test_program import check, refused, zero_on, zero_over

import zerojax
from zerojax.models import gpt

pytestmark = pytest.mark.usefixtures("quick_compile")


one_f_one_b = functools.partial(zero_on, pipeline_schedule="1f1b")


def test_numbers_are_those_of_plain_jit() -> None:
    check(one_f_one_b(2, 2, 4), "sgd", steps=1, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes", "micro_batches", "stage"),
    [
        ("remat", {"data": 2, "stage": 4}, 8, 1),
        ("", {"stage": 2, "data": 2}, 8, 3),
        ("experts dropout", {"stage": 4, "data": 1}, 4, 2),
        ("llama", {"stage": 4, "data": 1}, 16, 1),
        ("gpt", {"replica": 2, "stage": 2, "data": 2}, 4, 2),
        pytest.param("remat", {"stage": 2, "data": 1}, 8, 0, marks=pytest.mark.sweep),
        pytest.param("remat", {"stage": 4, "data": 2}, 8, 1, marks=pytest.mark.sweep),
        pytest.param("remat", {"stage": 4, "data": 1}, 16, 1, marks=pytest.mark.sweep),
        pytest.param("", {"replica": 2, "stage": 2, "data": 2}, 4, 2, marks=pytest.mark.sweep),
        pytest.param("dropout", {"stage": 2, "data": 2}, 4, 1, marks=pytest.mark.sweep),
        pytest.param("experts", {"stage": 2, "data": 2}, 4, 1, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_numbers_of_models_and_meshes(
    model: str, axes: dict[str, int], micro_batches: int, stage: int
) -> None:
    check(zero_over(axes, micro_batches, stage, pipeline_schedule="1f1b"), model)


def weighted_step(state: Any, tokens: jax.Array) -> Any:
    """A step whose loss weighs positions, with dropout before the head, that also returns the loss
    of each row, the accuracy, and how far the losses of rows are from their mean."""

    def loss_of(params: Any) -> Any:
        out, _ = state.apply_fn({"params": params}, tokens)
        key = jax.random.fold_in(jax.random.key(3), state.step)
        out = jnp.where(jax.random.bernoulli(key, 0.9, out.shape), out, 0.0)
        logits, targets = jax.nn.log_softmax(out[:, :-1]), tokens[:, 1:]
        weights = (targets % 3 > 0).astype(out.dtype)
        losses = -jnp.take_along_axis(logits, targets[..., None], -1)[..., 0] * weights
        right = ((logits.argmax(-1) == targets) * weights).sum() / weights.sum()
        by_row = losses.sum(-1)
        spread = ((by_row - by_row.mean()) ** 2).mean()
        return losses.sum() / weights.sum(), (by_row, right, spread)

    (loss, more), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), (loss, more)


@pytest.mark.slow
def test_rows_and_sums_that_a_step_returns() -> None:
    check(one_f_one_b(2, 2, 4, 0), "remat", weighted_step)


def contrastive_step(state: Any, tokens: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        out, _ = state.apply_fn({"params": params}, tokens)
        rows = out.mean(1)
        return -jnp.diagonal(jax.nn.log_softmax(rows @ rows.T)).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def test_a_loss_between_rows_is_refused() -> None:
    match = r'between .* through the layers.* "schedule": "gpipe"'
    refused(one_f_one_b(2, 2, 4), match, step=contrastive_step)


def test_an_encoder_and_a_decoder_are_refused() -> None:
    match = r'has 4 loops over layers.* "schedule": "gpipe"'
    refused(one_f_one_b(2, 2, 4), match, models.t5_state, models.t5_step)


def test_uneven_micro_batches_are_refused() -> None:
    match = r'"1f1b" needs micro-batches that the 2 stages divide'
    refused(one_f_one_b(2, 2, 3), match, rows=24)


@pytest.mark.parametrize(("schedule", "slots"), [("gpipe", 17), ("1f1b", 7)])
def test_a_stage_keeps_fewer_micro_batches_than_with_gpipe(schedule: str, slots: int) -> None:
    zero = zero_on(4, 1, 16, pipeline_schedule=schedule)
    state = zero.abstract_state(lambda: models.stack("remat", layers=8))
    text = zero(models.train_step).lower(state, batches(16, 1)[0]).as_text()
    # The inputs of a stage's two layers, by micro-batch.
    found = re.findall(rf"tensor<(\d+)x2x1x{models.TOKENS}x16xf32>", text)
    assert max(map(int, found)) == slots


def temporary_bytes(schedule: str) -> int:
    """Compiles 16 micro-batches in 4 stages for absent H100s."""
    config = gpt.GPTConfig(
        vocab_size=256, block_size=512, n_layer=8, n_head=4, n_embd=256, scan=True, remat=True
    )
    mesh = zerojax.topology("h100", devices=4, axes={"stage": 4, "data": 1})
    zero = zerojax.zero(
        stage=1, gradient_accumulation_steps=16, mesh=mesh, pipeline_schedule=schedule
    )
    tokens = jax.ShapeDtypeStruct((16, 512), jnp.int32)
    state = zero.abstract_state(lambda: models.state_of(gpt.GPT(config), jnp.ones((1, 512), int)))
    compiled = zero(models.train_step).lower(state, tokens).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.sweep
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler", "full_compile")
def test_memory_of_what_a_stage_keeps() -> None:
    kept = 2 * 512 * 256 * 4  # the inputs of a stage's layers for one micro-batch
    saved = temporary_bytes("gpipe") - temporary_bytes("1f1b")
    assert saved > (17 - 7) * kept / 2
