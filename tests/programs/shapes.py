"""How a step is called, wrapped and what it returns."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.optimizers import NNXRegression, nnx_clipped_step, nnx_create
from programs.program import (
    ADAM,
    SGD,
    WIDTH,
    Program,
    creator,
    refused,
    regression_step,
    vectors,
)


def doubling(step: Any) -> Any:
    """A user's own decorator: the targets count twice."""

    @functools.wraps(step)
    def wrapped(state: Any, batch: Any) -> Any:
        return step(state, batch | {"y": 2 * batch["y"]})

    return wrapped


@dataclass(frozen=True)
class Options:
    """A configuration as a static argument."""

    power: int
    dtype: Any


def static_step(state: TrainState, batch: Any, options: Options, train: bool) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"].astype(options.dtype)
        error = jnp.abs(state.apply_fn({"params": params}, x) - batch["y"])
        return jnp.mean(error**options.power) if train else jnp.mean(error)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def with_options(rng: np.random.Generator) -> tuple[Any, ...]:
    return (*vectors(rng), Options(4, jnp.float32), True)


class Trainer:
    """A step in a class."""

    scale = 0.5

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        return regression_step(state, batch | {"x": self.scale * batch["x"]})


def alone_step(state: TrainState, batch: Any) -> TrainState:
    return regression_step(state, batch)[0]


def call_alone(step: Any, state: Any, arguments: Any) -> Any:
    return step(state, *arguments), {}


def pair_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, Any]:
    return regression_step(state, {"x": x, "y": y})


def pair(rng: np.random.Generator) -> tuple[Any, ...]:
    (batch,) = vectors(rng)
    return batch["x"], batch["y"]


def call_by_keyword(step: Any, state: Any, arguments: Any) -> Any:
    (batch,) = arguments
    return step(state=state, batch=batch)


def rate_step(state: TrainState, batch: Any, rate: float, *, power: int = 2) -> Any:
    """Numbers beside the batch, one by keyword."""

    def loss_fn(params: Any) -> jax.Array:
        error = state.apply_fn({"params": params}, batch["x"]) - batch["y"]
        return rate * jnp.mean(jnp.abs(error) ** power)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def call_rate(step: Any, state: Any, arguments: Any) -> Any:
    return step(state, *arguments, power=4)


def results_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Results of every kind."""

    def loss_fn(params: Any) -> Any:
        made = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((made - batch["y"]) ** 2), made

    (loss, made), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    error = jnp.abs(made - batch["y"])
    new = state.apply_gradients(grads=grads)
    near = error < 0.5
    floats = {
        "mean": error.mean(), "sum": error.sum(), "max": error.max(), "min": error.min(),
        "masked": (error.mean(-1) * batch["mask"]).sum() / batch["mask"].sum(),
        "root": jnp.sqrt(loss), "log": jnp.log(loss), "sum of two": loss + error.max(),
    }  # fmt: skip
    flags = {"any": near.any(), "all": (error < 100).all(), "not": ~(error > 3).any()}
    counts = {
        "near": near.sum(), "rows": near.size, "argument": jnp.int32(3), "step": new.step,
        "before": state.step, "share": near.mean(), "most": (error > 1).sum(-1).max(),
    }  # fmt: skip
    rows = made, (error.mean(-1), near.all(-1))
    return new, (floats, {"flags": flags, "counts": counts}, rows, [loss], None)


def deviation_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """A result that needs the mean before it looks at the rows."""
    new, _ = regression_step(state, batch)
    made = state.apply_fn({"params": state.params}, batch["x"])
    return new, {"deviation": made.std()}


def vector_results_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Vectors that have no rows: reduced over the batch, or made of parameters."""
    new, metrics = regression_step(state, batch)
    made = state.apply_fn({"params": state.params}, batch["x"])
    return new, metrics | {
        "by feature": made.mean(0),
        "totals": made.sum(0),
        "histogram": jnp.bincount(made.argmax(-1), length=WIDTH),
        "bias": new.params["Dense_0"]["bias"],
    }


def graphs(rng: np.random.Generator) -> tuple[Any, ...]:
    """Sixteen graphs of four nodes and eight edges: leaves with leading dimensions of their own."""
    graph = np.repeat(np.arange(16), 8) * 4
    return (
        {
            "nodes": rng.normal(size=(64, WIDTH)),
            "senders": (graph + rng.integers(4, size=128)).astype(np.int32),
            "receivers": (graph + rng.integers(4, size=128)).astype(np.int32),
            "graph": np.repeat(np.arange(16, dtype=np.int32), 4),
            "label": rng.integers(WIDTH, size=17 - 1).astype(np.int32),
            "weights": rng.random(5),
        },
    )


class GraphNetwork(nn.Module):
    """Messages along edges, summed; graphs are means of their nodes."""

    @nn.compact
    def __call__(self, batch: Any) -> jax.Array:
        x = nn.Dense(WIDTH)(batch["nodes"])
        messages = nn.Dense(WIDTH)(x[batch["senders"]])
        x = nn.tanh(x + jax.ops.segment_sum(messages, batch["receivers"], len(x)))
        return nn.Dense(WIDTH)(jax.ops.segment_sum(x, batch["graph"], 16))


def create_graphs(key: jax.Array) -> TrainState:
    model = GraphNetwork()
    params = model.init(key, jax.tree.map(jnp.asarray, graphs(np.random.default_rng(0))[0]))
    return TrainState.create(apply_fn=model.apply, params=params["params"], tx=ADAM)


def graph_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        logs = nn.log_softmax(state.apply_fn({"params": params}, batch))
        losses = -jnp.take_along_axis(logs, batch["label"][:, None], 1)
        return losses.mean() * batch["weights"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


class Noisy(nnx.Module):
    """Noise that is data, dropout that draws from its own stream."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = NNXRegression(rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.body(x)


def order_create(key: jax.Array) -> Any:
    model = Noisy(nnx.Rngs(key))
    metrics = nnx.metrics.Average("loss")
    return metrics, nnx.Rngs(5), nnx.Optimizer(model, ADAM, wrt=nnx.Param), model


def order_step(metrics: Any, rngs: Any, batch: Any, optimizer: Any, model: Any) -> Any:
    """The objects in an order of their own, the batch among them."""
    weight = jax.random.uniform(rngs.weight())

    def loss_fn(model: Any) -> jax.Array:
        return weight * jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    metrics.update(loss=loss)
    return {"loss": loss, "weight": weight}


def call_in_order(step: Any, objects: Any, arguments: Any) -> Any:
    metrics, rngs, optimizer, model = objects
    return objects, step(metrics, rngs, *arguments, optimizer, model)


PROGRAMS = (
    Program("decorator", creator(), doubling(regression_step), vectors),
    Program("jitted", creator(), jax.jit(regression_step), vectors),
    Program(
        "statics_by_position", creator(tx=SGD), static_step, with_options,
        jit={"static_argnums": (2, 3)}, dtypes=("float64",),
    ),
    Program(
        "statics_by_name", creator(tx=SGD), static_step, with_options,
        jit={"static_argnames": ("options", "train")}, dtypes=("float64",),
    ),
    Program("method", creator(), Trainer().step, vectors),
    Program("state_alone", creator(), alone_step, vectors, call=call_alone),
    Program("pair", creator(), pair_step, pair, zero={"batch_argnums": (1, 2)}),
    Program("by_keyword", creator(), regression_step, vectors, call=call_by_keyword),
    Program("numbers", creator(), rate_step, lambda rng: (*vectors(rng), 0.5), call=call_rate),
    Program("results", creator(tx=SGD), results_step, vectors, dtypes=("float64",)),
    Program(
        "results_deviation", creator(), deviation_step, vectors,
        accumulated=refused("its result['deviation']"),
    ),
    Program("results_vectors", creator(), vector_results_step, vectors, dtypes=("float64",)),
    Program("graphs", create_graphs, graph_step, graphs, accumulated=refused("leading dimension")),
    Program("nnx_order", order_create, order_step, vectors, nnx=True, call=call_in_order),
    Program("nnx_jitted", nnx_create, nnx.jit(nnx_clipped_step), vectors, nnx=True),
)  # fmt: skip
