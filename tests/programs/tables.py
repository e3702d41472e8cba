"""Models that look few rows up in tables large enough to be sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from programs.program import ROWS, SGD, Program, creator

ENTRIES, FEATURES, WIDE = 2048, 16, 128


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
)  # fmt: skip
