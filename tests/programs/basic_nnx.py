"""Small NNX networks and GPTs around ``nnx.Optimizer``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.nnx_gpt import GPT
from programs.basic import ADAMW, tokens, vectors
from programs.program import Program, refused
from zerojax.models.gpt import GPTConfig
from zerojax.models.gpt import loss_fn as cross_entropy

Pair = tuple[nnx.Module, nnx.Optimizer]


def nnx_creator(
    make: Callable[[nnx.Rngs], nnx.Module], tx: optax.GradientTransformation = ADAMW
) -> Callable[[jax.Array], Pair]:
    """``create(key)`` for a model that ``make(rngs)`` returns."""

    def create(key: jax.Array) -> Pair:
        model = make(nnx.Rngs(key))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    return create


class MLP(nnx.Module):
    """Linear layers with tanh between; normalized and with dropout if so asked."""

    def __init__(self, rngs: nnx.Rngs, *, norm: bool = False) -> None:
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


def gpt(name: str, *, remat: bool = False) -> Program:
    def make(rngs: nnx.Rngs) -> nnx.Module:
        # An nnx.Embed computes in the dtype that it is created with.
        dtype = jax.dtypes.canonicalize_dtype(float)
        config = GPTConfig(
            vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=16, remat=remat, dtype=dtype,
        )  # fmt: skip
        return GPT(config, rngs)

    return Program(name, nnx_creator(make), language_step, tokens, nnx=True, dtypes=("float64",))


PROGRAMS = (
    Program("nnx_mlp", nnx_creator(MLP), regression_step, vectors, nnx=True),
    Program(
        "nnx_norm", nnx_creator(lambda rngs: MLP(rngs, norm=True)), regression_step, vectors,
        nnx=True, accumulated=refused("accumulate_statistics=True"),
    ),
    gpt("nnx_gpt"),
    gpt("nnx_gpt_remat", remat=True),
)  # fmt: skip
