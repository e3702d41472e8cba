"""The distillation loss: its formula, its gradient, accumulation, and what it refuses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax

rng = np.random.default_rng(0)
STUDENT, TEACHER = (rng.normal(0, 3, (8, 5, 11)).astype(np.float32) for _ in range(2))
TARGETS = rng.integers(0, 11, (8, 5))


def expected(temperature: float, hard_weight: float) -> np.ndarray:
    """Returns the formula of the docstring in fp64."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    student, teacher = log_softmax(STUDENT / temperature), log_softmax(TEACHER / temperature)
    soft = temperature**2 * (np.exp(teacher) * (teacher - student)).sum(-1)
    hard = -np.take_along_axis(log_softmax(STUDENT), TARGETS[..., None], -1)[..., 0]
    combined: np.ndarray = (1 - hard_weight) * soft + hard_weight * hard
    return combined


@pytest.mark.parametrize(("temperature", "weight"), [(2.0, 0.5), (1.0, 0.0), (4.0, 1.0)])
def test_losses_are_those_of_the_formula(temperature: float, weight: float) -> None:
    options = dict(temperature=temperature, hard_weight=weight)
    losses = zerojax.distillation_loss(STUDENT, TEACHER, TARGETS, **options)
    np.testing.assert_allclose(losses, expected(temperature, weight), rtol=1e-4)
    soft = zerojax.distillation_loss(STUDENT, TEACHER, temperature=temperature)
    np.testing.assert_allclose(soft, expected(temperature, 0), rtol=1e-4)


def test_the_teacher_has_no_gradient_and_bf16_is_widened() -> None:
    def loss(student: jax.Array, teacher: jax.Array) -> jax.Array:
        losses = zerojax.distillation_loss(student, teacher, TARGETS)
        assert losses.dtype == jnp.float32
        return losses.mean()

    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (STUDENT, TEACHER)]
    of_student, of_teacher = jax.grad(loss, argnums=(0, 1))(*narrow)
    assert np.abs(of_student).max() > 0
    assert not np.any(of_teacher)


def test_a_step_with_a_mask_and_micro_batches_is_the_plain_one() -> None:
    """The teacher is a field of the state."""

    class State(TrainState):
        teacher: Any

    x = rng.normal(size=(16, 8)).astype(np.float32)
    batch = dict(x=x, y=rng.integers(0, 11, 16), mask=(np.arange(16) % 3 > 0).astype(np.float32))

    def create_state() -> State:
        params = {"w": jnp.asarray(rng.normal(size=(8, 11)), jnp.float32)}
        teacher = {"w": jnp.asarray(rng.normal(size=(8, 11)), jnp.float32)}
        return State.create(apply_fn=None, params=params, tx=optax.sgd(0.1), teacher=teacher)

    def step(state: State, batch: dict[str, Any]) -> tuple[State, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits, taught = batch["x"] @ params["w"], batch["x"] @ state.teacher["w"]
            losses = zerojax.distillation_loss(logits, taught, batch["y"])
            return zerojax.weighted_mean(losses, batch["mask"])

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = create_state()
    after, loss = jax.jit(step)(state, batch)
    options: Any = dict(stage=3, gradient_accumulation_steps=2)
    zero = zerojax.zero(stage3_param_persistence_threshold=0, **options)
    ours, our_loss = zero(step)(state, batch)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(ours.params["w"], after.params["w"], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(ours.teacher["w"], state.teacher["w"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(teacher_logits=TEACHER[..., :9]), r"student are \[8, 5, 11\], .*\[8, 5, 9\]"),
        (dict(targets=TARGETS[:, :3]), r"targets are int64\[8, 3\]. .* integers \[8, 5\]"),
        (dict(targets=TARGETS * 1.0), r"targets are float64\[8, 5\]. Pass token numbers"),
        (dict(temperature=0.0), r"temperature = 0.0 must be above 0"),
        (dict(hard_weight=1.5), r"hard_weight = 1.5 from 0 to 1"),
    ],
)
def test_bad_input_is_named(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(teacher_logits=TEACHER, targets=TARGETS)
    with pytest.raises(ValueError, match=message):
        zerojax.distillation_loss(STUDENT, **given | changed)
