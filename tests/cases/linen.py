"""Cases in flax linen, around ``flax.training.train_state.TrainState``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

from cases.case import ROWS, Case, batches, cast, labelled, tokens, vectors, with_key
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.gpt import loss_fn as cross_entropy

ADAMW = optax.adamw(3e-3, weight_decay=0.1)
MOMENTUM = optax.sgd(0.05, momentum=0.9)


def creator(
    model: nn.Module,
    example: Any,
    tx: optax.GradientTransformation = ADAMW,
    kind: type[TrainState] = TrainState,
    **extra: Callable[[Any], Any],
) -> Callable[[jax.Array, Any], TrainState]:
    """``create(key, dtype)`` for a model; ``extra`` are fields made from the parameters."""

    def create(key: jax.Array, dtype: Any) -> TrainState:
        params = cast(model.init(key, example)["params"], dtype)
        fields = {name: make(params) for name, make in extra.items()}
        return kind.create(apply_fn=model.apply, params=params, tx=tx, **fields)

    return create


class MLP(nn.Module):
    """Dense layers with tanh between."""

    widths: tuple[int, ...] = (32, 24, 8)
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
        for width in self.widths[:-1]:
            x = nn.tanh(nn.Dense(width)(x))
            x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        return nn.Dense(self.widths[-1])(x)


def regression_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        prediction = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((prediction - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


MLP_INPUT = np.ones((1, 16), np.float32)


class KeyedState(TrainState):
    """Carries the key of its dropout."""

    key: jax.Array


def keyed_step(state: KeyedState, batch: Any) -> tuple[KeyedState, Any]:
    key, dropout = jax.random.split(state.key)

    def loss_fn(params: Any) -> jax.Array:
        prediction = state.apply_fn(
            {"params": params}, batch["x"], deterministic=False, rngs={"dropout": dropout}
        )
        return jnp.mean((prediction - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads).replace(key=key), {"loss": loss}


class AveragedState(TrainState):
    """Carries an exponential moving average of its parameters."""

    average: Any


def averaged_step(state: AveragedState, batch: Any) -> tuple[AveragedState, Any]:
    new, metrics = regression_step(state, batch)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.average, new.params)
    return new.replace(average=average), metrics


def has_aux_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        logits = state.apply_fn({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), {"right": logits.argmax(-1) == batch["label"], "logits": logits}

    (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    new = state.apply_gradients(grads=grads)
    return new, {"loss": loss, "accuracy": aux["right"].mean(), "logits": aux["logits"]}


def masked_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> jax.Array:
        prediction = state.apply_fn({"params": params}, batch["x"])
        losses = jnp.mean((prediction - batch["y"]) ** 2, axis=-1)
        return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def masked_vectors(dtype: Any) -> list[tuple[Any, ...]]:
    """One to six of the 32 rows count, all of them on the first three of eight devices."""

    def make(rng: np.random.Generator) -> Any:
        mask = np.zeros(ROWS)
        mask[rng.choice(10, size=rng.integers(1, 7), replace=False)] = 1
        return {"x": rng.normal(size=(ROWS, 16)), "y": rng.normal(size=(ROWS, 8)), "mask": mask}

    return batches(dtype, make)


def contrastive_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Each row against every other row of the batch."""

    def loss_fn(params: Any) -> jax.Array:
        a = state.apply_fn({"params": params}, batch["x"])
        logits = a @ batch["y"].T
        labels = jnp.arange(len(logits))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


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


def gpt_step(state: TrainState, tokens: jax.Array, key: jax.Array) -> tuple[TrainState, Any]:
    dropout = jax.random.fold_in(key, state.step)

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn(
            {"params": params}, tokens[:, :-1], deterministic=False, rngs={"dropout": dropout}
        )
        return cross_entropy(logits, tokens[:, 1:])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


TOKENS = np.ones((1, 8), np.int32)


def gpt(name: str, *, dropout: float = 0.0, scan: bool = False, remat: bool = False) -> Case:
    config = GPTConfig(
        vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=16,
        dropout=dropout, scan=scan, remat=remat,
    )  # fmt: skip
    return Case(
        name, creator(GPT(config), TOKENS), gpt_step, lambda dtype: with_key(tokens(dtype)),
        averages=not dropout,
    )  # fmt: skip


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


def create_convnet(key: jax.Array, dtype: Any) -> BatchNormState:
    model = ConvNet()
    variables = cast(model.init(key, np.ones((1, 8, 8, 3), np.float32)), dtype)
    return BatchNormState.create(apply_fn=model.apply, tx=MOMENTUM, **variables)


def convnet_step(state: BatchNormState, batch: Any) -> tuple[BatchNormState, Any]:
    def loss_fn(params: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new

    (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return state, {"loss": loss}


def images(dtype: Any) -> list[tuple[Any, ...]]:
    return batches(
        dtype,
        lambda rng: {
            "image": rng.normal(size=(ROWS, 8, 8, 3)),
            "label": rng.integers(8, size=ROWS, dtype=np.int32),
        },
    )


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


class PartitionedMLP(nn.Module):
    """An MLP whose layers are cut over "model": columns, then rows, then columns again."""

    logical: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def cut(*names: str | None) -> tuple[Any, Any]:
            kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros
            if self.logical:
                logical = tuple(name and "features" for name in names)
                rules = (("features", "model"),)
                return (
                    nn.with_logical_partitioning(kernel, logical, rules=rules),
                    nn.with_logical_partitioning(bias, logical[1:], rules=rules),
                )
            return nn.with_partitioning(kernel, names), nn.with_partitioning(bias, names[1:])

        for width, names in ((32, (None, "model")), (24, ("model", None)), (8, (None, "model"))):
            kernel, bias = cut(*names)
            x = nn.tanh(nn.Dense(width, kernel_init=kernel, bias_init=bias)(x))
        return x


def megatron_specs(params: Any) -> Any:
    """PartitionSpecs of a GPT cut over "model", in the form of its parameters."""

    def spec(path: Any, x: jax.Array) -> PartitionSpec:
        module, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-2:]
        whole = (None,) * x.ndim
        if module in ("c_attn", "c_fc"):
            return PartitionSpec(*whole[1:], "model")
        if module == "c_proj" and name == "kernel":
            return PartitionSpec(*whole[2:], "model", None)
        return PartitionSpec("model") if module == "wte" else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, params)


PARTITIONED = (
    Case("partitioned", creator(PartitionedMLP(), MLP_INPUT), regression_step, vectors),
    Case("logical", creator(PartitionedMLP(logical=True), MLP_INPUT), regression_step, vectors),
)

CASES = (
    Case("mlp", creator(MLP(), MLP_INPUT), regression_step, vectors, averages=True),
    Case("momentum", creator(MLP(), MLP_INPUT, MOMENTUM), regression_step, vectors, averages=True),
    gpt("gpt"),
    gpt("gpt_dropout", dropout=0.2),
    gpt("gpt_remat", remat=True),
    gpt("gpt_scan", dropout=0.2, scan=True),
    gpt("gpt_scan_remat", scan=True, remat=True),
    Case("convnet", create_convnet, convnet_step, images),
    Case("has_aux", creator(MLP(), MLP_INPUT), has_aux_step, labelled, averages=True),
    Case("masked", creator(MLP(), MLP_INPUT), masked_step, masked_vectors),
    Case("contrastive", creator(MLP(), MLP_INPUT), contrastive_step, vectors),
    Case("tied", creator(Tied(), TOKENS), language_step, tokens, averages=True),
    Case(
        "odd", creator(MLP((13, 7, 5)), np.ones((1, 11), np.float32)), regression_step,
        lambda dtype: vectors(dtype, 11, 5), averages=True,
    ),
    Case(
        "key_in_state",
        creator(MLP(dropout=0.2), MLP_INPUT, kind=KeyedState, key=lambda _: jax.random.key(3)),
        keyed_step, vectors,
    ),
    Case(
        "average_in_state",
        creator(MLP(), MLP_INPUT, kind=AveragedState, average=lambda p: jax.tree.map(jnp.copy, p)),
        averaged_step, vectors, averages=True,
    ),
    Case("frozen", creator(MLP(), MLP_INPUT, FREEZE), frozen_step, vectors, averages=True),
    Case(
        "masked_decay", creator(MLP(), MLP_INPUT, DECAY_KERNELS), regression_step, vectors,
        averages=True,
    ),
    Case(
        "jitted", creator(MLP(), MLP_INPUT), jax.jit(regression_step), vectors, averages=True
    ),
)  # fmt: skip
