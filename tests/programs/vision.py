"""Image classifiers with batch statistics and metrics objects."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.program import ADAM, ROW, SGD, WIDTH, Program, creator, labelled, refused


@flax.struct.dataclass
class Metrics:
    """Sums over what was seen since the last report."""

    loss: Any
    right: Any
    rows: Any
    steps: Any

    @classmethod
    def empty(cls) -> "Metrics":
        return cls(jnp.zeros(()), jnp.zeros((), int), jnp.zeros((), int), jnp.zeros((), int))

    def add(self, loss: jax.Array, right: jax.Array) -> "Metrics":
        return Metrics(
            self.loss + loss, self.right + right.sum(), self.rows + right.size, self.steps + 1
        )


class Classifier(nn.Module):
    """A dense network with a normalization."""

    batch_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH)(x)
        x = nn.BatchNorm(False, momentum=0.9)(x) if self.batch_norm else nn.LayerNorm()(x)
        return nn.Dense(WIDTH)(nn.relu(x))


class MeasuredState(TrainState):
    """Carries running statistics and what was measured."""

    metrics: Metrics
    batch_stats: Any = None


def step(state: MeasuredState, batch: Any) -> tuple[MeasuredState, Any]:
    def loss_fn(params: Any) -> Any:
        variables = {"params": params}
        if state.batch_stats is not None:
            variables["batch_stats"] = state.batch_stats
        logits, new = state.apply_fn(variables, batch["x"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (logits, new)

    (loss, (logits, new)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    right = logits.argmax(-1) == batch["label"]
    state = state.apply_gradients(
        grads=grads, metrics=state.metrics.add(loss, right), batch_stats=new.get("batch_stats")
    )
    return state, {"loss": loss, "accuracy": right.mean(), "logits": logits}


def create(batch_norm: bool) -> Any:
    return creator(
        Classifier(batch_norm), ROW, SGD, MeasuredState, metrics=lambda _: Metrics.empty()
    )


class NNXClassifier(nnx.Module):
    """The classifier with a layer norm in NNX."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.relu(self.norm(self.first(x))))


def nnx_create(key: jax.Array) -> Any:
    model = NNXClassifier(nnx.Rngs(key))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param), metrics


def nnx_step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> None:
    """As flax's own MNIST example has it."""

    def loss_fn(model: Any) -> Any:
        logits = model(batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


BATCH_NORM = refused("accumulate_statistics=True")

PROGRAMS = (
    Program("batch_norm", create(True), step, labelled, accumulated=BATCH_NORM),
    Program("metrics_object", create(False), step, labelled),
    Program("nnx_metrics_object", nnx_create, nnx_step, labelled, nnx=True),
)
