"""Small linen networks and GPTs. Their dimensions are multiples of eight but where one says so."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from programs.program import ROWS, Program, copied, creator, keyed, refused, regression_step, told
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.gpt import loss_fn as cross_entropy

ADAMW = optax.adamw(3e-3, weight_decay=0.1)
MOMENTUM = optax.sgd(0.05, momentum=0.9)
INPUT = np.ones((1, 16), np.float32)
TOKENS = np.ones((1, 8), np.int32)


class MLP(nn.Module):
    """Dense layers with tanh between, [B, 16] -> [B, widths[-1]]."""

    widths: tuple[int, ...] = (32, 24, 8)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def mlp(tx: optax.GradientTransformation = ADAMW, **options: Any) -> Any:
    return creator(MLP(), INPUT, tx, **options)


def vectors(rng: np.random.Generator, n_in: int = 16, n_out: int = 8) -> tuple[Any, ...]:
    """Inputs and targets of a regression."""
    return ({"x": rng.normal(size=(ROWS, n_in)), "y": rng.normal(size=(ROWS, n_out))},)


def odd_vectors(rng: np.random.Generator) -> tuple[Any, ...]:
    return vectors(rng, 11, 5)


def tokens(rng: np.random.Generator, length: int = 9, vocabulary: int = 32) -> tuple[Any, ...]:
    """Rows of tokens, each in even strides, so that there is something to learn."""
    first = rng.integers(vocabulary, size=(ROWS, 1))
    stride = rng.integers(1, 4, size=(ROWS, 1))
    return (((first + stride * np.arange(length)) % vocabulary).astype(np.int32),)


def images(rng: np.random.Generator) -> tuple[Any, ...]:
    labels = rng.integers(8, size=ROWS, dtype=np.int32)
    return ({"image": rng.normal(size=(ROWS, 8, 8, 3)), "label": labels},)


class AveragedState(TrainState):
    """Carries an exponential moving average of its parameters."""

    average: Any


def averaged_step(state: AveragedState, batch: Any) -> tuple[AveragedState, Any]:
    new, metrics = regression_step(state, batch)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, new.params)
    return new.replace(average=average), metrics


class Tied(nn.Module):
    """One table looks tokens up and scores them."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(32, 24)
        x = nn.tanh(nn.Dense(24)(table(tokens)))
        return table.attend(x)


def language_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def dropout_step(state: TrainState, tokens: jax.Array, key: jax.Array) -> tuple[TrainState, Any]:
    dropout = jax.random.fold_in(key, state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(
            {"params": params}, tokens[:, :-1], deterministic=False, rngs={"dropout": dropout}
        )
        return cross_entropy(logits, tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def gpt(
    name: str, *, layers: int = 2, dropout: float = 0.0, scan: bool = False, remat: bool = False
) -> Program:
    config = GPTConfig(
        vocab_size=32, block_size=8, n_layer=layers, n_head=2, n_embd=16,
        dropout=dropout, scan=scan, remat=remat,
    )  # fmt: skip
    create = creator(GPT(config), TOKENS, ADAMW)
    if not dropout:
        return Program(name, create, language_step, tokens)
    noise = told("noise in the batch's shape")
    return Program(name, create, dropout_step, keyed(tokens), accumulated=noise)


class BatchNormState(TrainState):
    """Carries the running statistics of its normalization layers."""

    batch_stats: Any


class ConvNet(nn.Module):
    """[B, 8, 8, 3] -> [B, 8]."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(8)(x.mean((1, 2)))


def convnet_step(state: BatchNormState, batch: Any) -> tuple[BatchNormState, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return state, {"loss": loss}


def frozen_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """The first layer is held still twice over: no gradient reaches it, and no update."""

    def loss_fn(params: Any) -> jax.Array:
        params = params | {"Dense_0": jax.lax.stop_gradient(params["Dense_0"])}
        prediction = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((prediction - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def label_frozen(params: Any) -> Any:
    return {
        name: jax.tree.map(
            lambda _, frozen=name == "Dense_0": "still" if frozen else "moves", layer
        )
        for name, layer in params.items()
    }


FREEZE = optax.multi_transform({"moves": ADAMW, "still": optax.set_to_zero()}, label_frozen)
DECAY_KERNELS = optax.chain(
    optax.masked(
        optax.add_decayed_weights(0.1), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    ),
    MOMENTUM,
)

PROGRAMS = (
    Program("mlp", mlp(), regression_step, vectors),
    gpt("gpt"),
    gpt("gpt_dropout", dropout=0.2),
    gpt("gpt_remat", remat=True),
    gpt("gpt_scan", dropout=0.2, scan=True),
    gpt("gpt_scan_remat", scan=True, remat=True),
    Program(
        "convnet", creator(ConvNet(), np.ones((1, 8, 8, 3), np.float32), MOMENTUM, BatchNormState),
        convnet_step, images, accumulated=refused("accumulate_statistics=True"),
    ),
    Program("tied", creator(Tied(), TOKENS, ADAMW), language_step, tokens),
    Program(
        "odd", creator(MLP((13, 7, 5)), np.ones((1, 11), np.float32), ADAMW), regression_step,
        odd_vectors,
    ),
    Program("average_in_state", mlp(kind=AveragedState, average=copied), averaged_step, vectors),
    Program("frozen", mlp(FREEZE), frozen_step, vectors),
    Program("masked_decay", mlp(DECAY_KERNELS), regression_step, vectors),
)  # fmt: skip
