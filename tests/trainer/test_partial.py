"""An epoch's last update, of fewer rows than the others, has the numbers of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainer.jobs import POINTS

from zerojax import Trainer, TrainingArguments
from zerojax.trainer import classification_loss

pytestmark = pytest.mark.usefixtures("quick_compile")
X = np.stack([row["x"] for row in POINTS])
Y = np.array([row["label"] for row in POINTS])
RATE = 0.5


class Net(nn.Module):
    """x [rows, 8] to logits [rows, 4], with a block that is computed again."""

    normed: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        if self.normed:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(4)(nn.relu(nn.remat(nn.Dense)(16)(x)))


class NnxNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, dropout: float = 0.0) -> None:
        self.one, self.two = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.two(nnx.relu(self.one(x))))


def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def scalar(model: Any, batch: Any) -> jax.Array:
    """With a term that does not depend on the rows, and one of the parameters of a ratio."""
    logits = model(batch["x"])
    return losses(logits, batch["labels"]).mean() + 0.01 * jnp.mean(logits**2) + 0.5


def ratio(model: Any, batch: Any) -> jax.Array:
    """A mean over the rows of some classes, written out."""
    counted = (batch["labels"] < 3).astype(jnp.float32)
    return jnp.sum(losses(model(batch["x"]), batch["labels"]) * counted) / jnp.sum(counted)


def noisy(model: Any, batch: Any) -> jax.Array:
    """Random numbers by row, without effect."""
    noise = jax.random.bernoulli(jax.random.key(0), 0.5, batch["labels"].shape)
    return (losses(model(batch["x"]), batch["labels"]) * jnp.where(noise, 1.0, 1.0)).mean()


def spread(model: Any, batch: Any) -> jax.Array:
    """Rows meet: each is measured from the mean of all."""
    logits = model(batch["x"])
    return jnp.mean((logits - logits.mean(axis=0)) ** 2) + losses(logits, batch["labels"]).mean()


PAIR: Callable[..., Any] = classification_loss


def trained(
    folder: Path, n: int, loss: Any, *, model: Any = None, updates: int = 3, **more: Any
) -> Trainer:
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=1, max_grad_norm=0, max_steps=updates,
        logging_steps=1, save_strategy="no", seed=3, **more,
    )  # fmt: skip
    trainer = Trainer(
        Net() if model is None else model, args, train_dataset=POINTS[:n], loss=loss,
        optimizer=optax.sgd(RATE),
    )  # fmt: skip
    trainer.train()
    return trainer


def plain(trainer: Trainer, loss: Any, module: Net) -> list[float]:
    """The losses of a loop of jax and optax over the rows alone."""
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(3)), strict=True))
    variables: Any = module.init(keys, X[:1])
    params, rest = variables["params"], {k: v for k, v in variables.items() if k != "params"}

    def loss_fn(params: Any, rest: Any, batch: Any) -> Any:
        changed: dict[str, Any] = {}

        def model(x: jax.Array) -> jax.Array:
            logits, new = module.apply({"params": params, **rest}, x, train=True, mutable=[*rest])
            changed.update(new)
            return logits

        if loss is PAIR:
            return losses(model(batch["x"]), batch["labels"]).mean(), changed
        return loss(model, batch), changed

    gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    said = []
    for step in range(trainer.state.global_step):
        at = trainer.epochs.indices(step)
        (value, changed), grads = gradient(params, rest, {"x": X[at], "labels": Y[at]})
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        rest = rest | changed
        said.append(float(value))
    return said


def logged(trainer: Trainer) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.slow
@pytest.mark.parametrize("loss", [PAIR, scalar, ratio, noisy], ids=lambda f: f.__name__)
def test_the_rows_that_are_left_have_the_numbers_of_one_process(loss: Any, tmp_path: Path) -> None:
    k = 2
    n = 8 * k + 5  # 5 rows in the second and fourth update
    trainer = trained(tmp_path, n, loss, updates=4, gradient_accumulation_steps=k)
    assert [len(trainer.epochs.indices(step)) for step in range(4)] == [8 * k, 5] * 2
    np.testing.assert_allclose(logged(trainer), plain(trainer, loss, Net()), rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [spread, PAIR], ids=["spread", "batch statistics"])
def test_rows_that_meet_do_so_without_copies(loss: Any, tmp_path: Path) -> None:
    module = Net(normed=loss is PAIR)
    trainer = trained(tmp_path, 13, loss, model=module, updates=4)
    np.testing.assert_allclose(logged(trainer), plain(trainer, loss, module), rtol=3e-6)
    with pytest.raises(ValueError, match=r"has 5 of 16 rows, .* a pair \(values, weights\)"):
        trained(tmp_path, 21, loss, model=module, gradient_accumulation_steps=2)


@pytest.mark.slow
def test_nnx_has_the_same_numbers(tmp_path: Path) -> None:
    """Of as many rows in one update as on one device alone, with its own keys of dropout."""
    own = NnxNet(rngs=nnx.Rngs(0))
    trainer = trained(tmp_path, 21, PAIR, model=own, updates=2, gradient_accumulation_steps=2)
    graph, state, rest = nnx.split(own, nnx.Param, ...)

    def loss_fn(state: Any, batch: Any) -> Any:
        logits = PAIR(nnx.merge(graph, state, rest), batch)["logits"]
        return losses(logits, batch["labels"]).mean()

    said, gradient = [], jax.jit(jax.value_and_grad(loss_fn))
    for step in range(2):
        at = trainer.epochs.indices(step)
        value, grads = gradient(state, {"x": X[at], "labels": Y[at]})
        said.append(float(value))
        state = jax.tree.map(lambda p, g: p - RATE * g, state, grads)
    np.testing.assert_allclose(logged(trainer), said, rtol=3e-6)
    dropped = NnxNet(rngs=nnx.Rngs(0), dropout=0.5)
    trainer = trained(tmp_path, 5, PAIR, model=dropped, updates=2)
    assert int(trainer.train_state[0].dropout.rngs.count[...]) == 2
