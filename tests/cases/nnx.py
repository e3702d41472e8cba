"""Cases in flax NNX, around ``nnx.Optimizer``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from cases.case import Case, cast, tokens, vectors
from zerojax.models.gpt_nnx import GPT, GPTConfig
from zerojax.models.gpt_nnx import loss_fn as cross_entropy

ADAMW = optax.adamw(3e-3, weight_decay=0.1)
MOMENTUM = optax.sgd(0.05, momentum=0.9)

Pair = tuple[nnx.Module, nnx.Optimizer]


def creator(
    make: Callable[[nnx.Rngs, Any], nnx.Module], tx: optax.GradientTransformation = ADAMW
) -> Callable[[jax.Array, Any], Pair]:
    """``create(key, dtype)`` for a model that ``make(rngs, dtype)`` makes."""

    def create(key: jax.Array, dtype: Any) -> Pair:
        model = make(nnx.Rngs(key), dtype)
        nnx.update(model, cast(nnx.state(model), dtype))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return create


class MLP(nnx.Module):
    """Linear layers with tanh between; normalized and with dropout if so asked."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = None, *, norm: bool = False) -> None:
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(0.2, rngs=rngs) if norm else None
        self.second = nnx.Linear(32, 24, rngs=rngs)
        self.third = nnx.Linear(24, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.tanh(self.first(x))
        if self.norm is not None and self.dropout is not None:
            x = self.dropout(self.norm(x))
        return self.third(nnx.tanh(self.second(x)))


class PartitionedMLP(nnx.Module):
    """An MLP whose layers are cut over "model": columns, then rows, then columns again."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        del dtype

        def layer(n_in: int, n_out: int, *names: str | None) -> nnx.Linear:
            kernel, bias = nnx.initializers.lecun_normal(), nnx.initializers.zeros
            return nnx.Linear(
                n_in, n_out, rngs=rngs, kernel_init=nnx.with_partitioning(kernel, names),
                bias_init=nnx.with_partitioning(bias, names[1:]),
            )  # fmt: skip

        with nnx.use_eager_sharding(False):
            self.first = layer(16, 32, None, "model")
            self.second = layer(32, 24, "model", None)
            self.third = layer(24, 8, None, "model")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.third(nnx.tanh(self.second(nnx.tanh(self.first(x)))))


def regression_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def language_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> Any:
    def loss_fn(model: Any) -> jax.Array:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def gpt(name: str, *, dropout: float = 0.0, remat: bool = False) -> Case:
    def make(rngs: nnx.Rngs, dtype: Any) -> nnx.Module:
        config = GPTConfig(
            vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=16,
            dropout=dropout, remat=remat, dtype=dtype,  # an nnx.Embed keeps the one it starts with
        )  # fmt: skip
        return GPT(config, rngs)

    return Case(name, creator(make), language_step, tokens, nnx=True, averages=not dropout)


PARTITIONED = (
    Case("nnx_partitioned", creator(PartitionedMLP), regression_step, vectors, nnx=True),
)

CASES = (
    Case("nnx_mlp", creator(MLP), regression_step, vectors, nnx=True, averages=True),
    Case("nnx_momentum", creator(MLP, MOMENTUM), regression_step, vectors, nnx=True, averages=True),
    Case(
        "nnx_norm",
        creator(lambda rngs, dtype: MLP(rngs, norm=True)),
        regression_step,
        vectors,
        nnx=True,
    ),
    gpt("nnx_gpt"),
    gpt("nnx_gpt_dropout", dropout=0.2),
    gpt("nnx_gpt_remat", remat=True),
)
