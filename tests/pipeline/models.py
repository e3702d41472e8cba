"""Small models whose layers are a loop, as their users write them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.models import llama, t5

SGD = optax.sgd(0.1, momentum=0.9)
"""Adam would divide gradients that are zero but for rounding, as those of keys' biases, by
themselves."""
LAYERS, VOCABULARY, TOKENS = 4, 32, 8


class Layer(nn.Module):
    """An MLP with a residual.

    Attributes:
      kind: Words: "dropout" draws a mask; "experts" routes tokens, and adds a loss of each row;
        "balanced" does so with a loss of the fractions of the global batch.
    """

    kind: str

    @nn.compact
    def __call__(self, carry: Any, _: Any) -> Any:
        x, loss = carry
        d = x.shape[-1]
        h = nn.LayerNorm()(x)
        if "experts" in self.kind or "balanced" in self.kind:
            weights = nn.softmax(nn.Dense(4)(h))
            w = self.param("experts", nn.initializers.lecun_normal(), (4, d, d), x.dtype)
            y = jnp.einsum("btd,edf,bte->btf", h, w, weights)
            over = (0, 1) if "balanced" in self.kind else 1
            fractions = weights.mean(over) * (weights > 0.3).astype(x.dtype).mean(over)
            loss += fractions.sum(-1).mean()
        else:
            y = nn.Dense(d)(nn.gelu(nn.Dense(2 * d)(h)))
        if "dropout" in self.kind:
            y = nn.Dropout(0.2, deterministic=False)(y)
        return (x + y, loss), None


class Stack(nn.Module):
    """A decoder with a tied table.

    Attributes:
      kind: The kind of its layers; with the word "remat" the backward pass runs each layer again.
      layers: The number of layers.
    """

    kind: str = ""
    layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = nn.Embed(VOCABULARY, 16)
        x = table(tokens)
        layer = nn.remat(Layer, prevent_cse=False) if "remat" in self.kind else Layer
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        (x, loss), _ = stack(self.kind, name="layers")((x, jnp.zeros((), x.dtype)), None)
        return table.attend(nn.LayerNorm()(x)), loss


def batches(rows: int, steps: int) -> list[np.ndarray]:
    """Returns the tokens of some steps, the same in each call."""
    rng = np.random.default_rng(0)
    shape = rows, TOKENS
    return [rng.integers(1, VOCABULARY, shape).astype(np.int32) for _ in range(steps)]


def state_of(model: nn.Module, *inputs: Any, tx: Any = None) -> TrainState:
    """Returns the initial state of a model."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.init)(keys, *inputs)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)) if tx is None else tx
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=tx)


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
    return losses.mean()


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """A step of a model that returns logits, or logits and a further loss."""

    def loss(params: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(7), state.step)
        out = state.apply_fn({"params": params}, tokens, rngs={"dropout": key})
        logits, more = out if isinstance(out, tuple) else (out, 0.0)
        return cross_entropy(logits, tokens) + 0.1 * more

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def stack(kind: str = "", **fields: Any) -> TrainState:
    return state_of(Stack(kind, **fields), jnp.zeros((1, TOKENS), jnp.int32))


def sgd_state() -> TrainState:
    return state_of(Stack("remat"), jnp.zeros((1, TOKENS), jnp.int32), tx=SGD)


def llama_state() -> TrainState:
    sizes = dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=16, n_inner=32)
    config = llama.LlamaConfig(
        vocab_size=VOCABULARY, block_size=TOKENS, scan=True, remat=True, **sizes
    )
    return state_of(llama.Llama(config), jnp.zeros((1, TOKENS), jnp.int32), tx=SGD)


def t5_state() -> TrainState:
    """An encoder and a decoder, which reads the encoder's output in every layer."""
    config = t5.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=4, num_decoder_layers=4,
        num_heads=2, dropout_rate=0.0, scan=True,
    )  # fmt: skip
    tokens = jnp.zeros((1, TOKENS), jnp.int32)
    return state_of(t5.T5(config), tokens, tokens, tx=SGD)


def t5_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return cross_entropy(state.apply_fn({"params": params}, tokens, tokens), tokens)

    value, grads = zerojax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def create(model: str) -> TrainState:
    """Returns the initial state of a model by its name, or of a stack by its kind."""
    states = {"sgd": sgd_state, "llama": llama_state, "t5": t5_state}
    return states[model]() if model in states else stack(model)


class NNXBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class NNXStack(nnx.Module):
    """A decoder of NNX with a loop over its blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, 16, rngs=rngs)

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> NNXBlock:
            return NNXBlock(rngs)

        self.blocks = create(rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: NNXBlock) -> jax.Array:
            return block(x)

        return self.table.attend(run(self.table(tokens), self.blocks))


def nnx_step(model: NNXStack, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss(model: NNXStack) -> jax.Array:
        return cross_entropy(model(tokens), tokens)

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value
