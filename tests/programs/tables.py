"""Models that look few rows up in tables large enough to be sharded, and gradients used again."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.program import ROWS, SGD, Program, creator, refused

ENTRIES, FEATURES, WIDE = 2048, 16, 128
INTERACT = refused("cannot be accumulated over 4 micro-batches")


def clicks(rng: np.random.Generator) -> tuple[Any, ...]:
    """Two entries a row, some of them negative or beyond the table, and a number."""
    return (
        {
            "ids": rng.integers(-3, ENTRIES + 3, size=(ROWS, 2), dtype=np.int32),
            "y": rng.normal(size=ROWS),
        },
    )


class Tables(nn.Module):
    """Two tables and a product: one lookup clips, the other one reads zeros beyond the table. One
    table is used for the output, too."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        init = nn.initializers.normal(1.0)
        one, two = (self.param(name, init, (ENTRIES, FEATURES)) for name in ("one", "two"))
        left = jnp.take(one, ids[:, 0], axis=0, mode="clip")
        right = two.at[ids[:, 1]].get(mode="fill", fill_value=0)
        scores = nn.tanh(nn.Dense(FEATURES)(left)) @ one.T
        return jnp.sum(left * right, -1) + 0.01 * jnp.sum(scores**2, -1)


def tables_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, batch["ids"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


class NnxTables(nnx.Module):
    """A tall table, sharded along its rows, and a wide one, sharded along its columns."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tall = nnx.Param(jax.random.normal(rngs.params(), (ENTRIES, FEATURES)))
        self.wide = nnx.Param(0.1 * jax.random.normal(rngs.params(), (64, 256)))
        self.out = nnx.Linear(256, FEATURES, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        right = self.out(jnp.take(self.wide[...], ids[:, 1] % 64, axis=0))
        return jnp.sum(self.tall[...][ids[:, 0] % ENTRIES] * right, -1)


def nnx_tables(key: jax.Array) -> tuple[Any, ...]:
    model = NnxTables(nnx.Rngs(key))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def nnx_tables_step(model: Any, optimizer: Any, batch: Any) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        return jnp.mean((model(batch["ids"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def wide_vectors(rng: np.random.Generator) -> tuple[Any, ...]:
    return ({"x": rng.normal(size=(ROWS, WIDE)), "y": rng.normal(size=(ROWS, WIDE))},)


class Wide(nn.Module):
    """Two dense layers, [B, 128] -> [B, 128]."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDE)(nn.tanh(nn.Dense(2 * WIDE)(x)))


wide = creator(Wide(), jnp.ones((1, WIDE)), tx=SGD)


def second_order(name: str) -> Any:
    """A step whose gradient is made of a gradient."""

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        def loss_fn(params: Any) -> jax.Array:
            return jnp.mean((state.apply_fn({"params": params}, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)

        def along(vector: Any) -> Any:
            return jax.jvp(jax.grad(loss_fn), (state.params,), (vector,))[1]

        def there() -> Any:
            norm = optax.tree.norm(grads)
            return jax.tree.map(lambda p, g: p + 0.1 * g / norm, state.params, grads)

        grads = {
            "curvature": lambda: jax.tree.map(
                lambda g, h: g + 0.1 * h, grads, along(jax.tree.map(jnp.sign, state.params))
            ),
            "hessian": lambda: jax.tree.map(lambda g, h: g + 0.1 * h, grads, along(grads)),
            "sharpness": lambda: jax.grad(loss_fn)(there()),
            "penalty": lambda: jax.grad(
                lambda p: loss_fn(p) + 0.1 * optax.tree.norm(jax.grad(loss_fn)(p), squared=True)
            )(state.params),
        }[name]()
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step


class NnxWide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDE, 2 * WIDE, rngs=rngs)
        self.second = nnx.Linear(2 * WIDE, WIDE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(nnx.tanh(self.first(x)))


def nnx_wide(key: jax.Array) -> tuple[Any, ...]:
    model = NnxWide(nnx.Rngs(key))
    return model, nnx.Optimizer(model, SGD, wrt=nnx.Param)


def nnx_hessian_step(model: Any, optimizer: Any, batch: Any) -> Any:
    graph, params = nnx.split(model)

    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    _, curved = jax.jvp(jax.grad(loss_fn), (params,), (grads,))
    optimizer.update(model, jax.tree.map(lambda g, h: g + 0.1 * h, grads, curved))
    return {"loss": loss}


class Convolved(nn.Module):
    """A table, a convolution and two dense layers, [B, 64] tokens -> [B]: large enough for
    quantized collectives."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(96, WIDE)(tokens)
        x = nn.tanh(nn.Conv(WIDE, (3,), name="conv")(x))
        x = nn.tanh(nn.Dense(2 * WIDE, name="first")(x))
        return nn.Dense(WIDE, name="second")(x).mean((1, 2))


def sentences(rng: np.random.Generator) -> tuple[Any, ...]:
    ids = rng.integers(0, 96, size=(ROWS, 64), dtype=np.int32)
    return ({"ids": ids, "y": rng.normal(size=ROWS)},)


PROGRAMS = (
    Program(
        "tables_convolved",
        creator(Convolved(), jnp.zeros((1, 64), jnp.int32), tx=optax.adam(3e-3)),
        tables_step, sentences,
    ),
    Program("tables", creator(Tables(), jnp.zeros((1, 2), jnp.int32), tx=SGD), tables_step, clicks),
    Program(
        "tables_nnx", nnx_tables, nnx_tables_step, clicks, nnx=True, dtypes=("float64",)
    ),
    Program("curvature", wide, second_order("curvature"), wide_vectors, dtypes=("float64",)),
    *(
        Program(
            f"{name}_wide", wide, second_order(name), wide_vectors, dtypes=("float64",),
            accumulated=INTERACT,
        )
        for name in ("hessian", "sharpness", "penalty")
    ),
    Program(
        "hessian_nnx", nnx_wide, nnx_hessian_step, wide_vectors, nnx=True, dtypes=("float64",),
        accumulated=INTERACT,
    ),
)  # fmt: skip
