"""Training steps that need only a small part of what they could hold or send.

Tables of which few rows are looked up, a table tied to the output, a head in float32, a frozen
base, and experts that choose among all tokens: programs that
``held_or_moved.py`` compiles beside those of ``extra_state.py``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import zerojax
from benchmarks.compiled import Program
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.loss import loss_fn

BF16 = jnp.bfloat16


def train_state(params: Any, tx: Any = None) -> TrainState:
    """A state of these parameters, by default under AdamW."""
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.adamw(1e-3))


def descend(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """The step of ``loss(params, batch)``."""

    def step(state: TrainState, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), value

    return step


def tables(
    number: int = 8, rows: int = 1_000_000, width: int = 128, looked_up: int = 4096
) -> Program:
    """Large tables, in each of which a row of the batch looks up one row, and a layer on these."""

    def create(key: jax.Array) -> TrainState:
        params = {f"table{i}": jnp.zeros((rows, width)) for i in range(number)}
        return train_state({**params, "out": jnp.zeros((number * width, 1024))})

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        found = [jnp.take(params[f"table{i}"], ids[:, i], axis=0) for i in range(number)]
        return jnp.mean(jnp.square(jnp.concatenate(found, -1) @ params["out"]))

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((looked_up, number), jnp.int32)

    return Program("eight tables", create, descend(loss), batch, lambda s: s.params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """A GPT whose table is tied to the output; each device has one row of ``tokens``."""

    layers: int = 24
    width: int = 1024
    vocabulary: int = 50304
    tokens: int = 1024
    scan: bool = True

    def model(self, dtype: Any = None) -> GPT:
        return GPT(
            GPTConfig(
                vocab_size=self.vocabulary, block_size=self.tokens, n_layer=self.layers,
                n_head=self.width // 64, n_embd=self.width, scan=self.scan, remat=True, dtype=dtype,
            )
        )  # fmt: skip

    def create(self, key: jax.Array, tx: Any = None) -> TrainState:
        return train_state(self.model().init(key, jnp.zeros((1, 8), jnp.int32))["params"], tx)

    def loss(self, params: Any, tokens: jax.Array, dtype: Any = None) -> jax.Array:
        logits = self.model(dtype).apply({"params": params}, tokens[:, :-1])
        return loss_fn(logits, tokens[:, 1:])  # type: ignore[arg-type]

    def batch(self, accumulation: int = 1) -> Callable[[int], Any]:
        def rows(devices: int) -> Any:
            return jax.ShapeDtypeStruct((devices * accumulation, self.tokens + 1), jnp.int32)

        return rows

    @property
    def parameters(self) -> int:
        d = self.width
        return self.layers * (12 * d + 13) * d + (self.vocabulary + self.tokens + 2) * d

    def looked_up(self, devices: int = 8) -> float:
        """The rows that all devices look up in a micro-batch, in shares of the parameters."""
        return devices * self.tokens * self.width / self.parameters

    def program(self, name: str, **changes: Any) -> Program:
        """One that descends on the loss."""
        mine = Program(name, self.create, descend(self.loss), self.batch(), lambda s: s.params)
        return dataclasses.replace(mine, **changes)


def tied(name: str, sizes: Language, accumulation: int, *, by_modules: bool = False) -> Program:
    """Micro-batches of a language model in bf16, by the setting or by its modules' ``dtype``."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return sizes.loss(params, tokens, BF16 if by_modules else None)

    settings = {"gradient_accumulation_steps": accumulation, "bf16": not by_modules}
    return sizes.program(
        name, step=descend(loss), batch=sizes.batch(accumulation), settings=settings
    )


def head_in_float32(layers: int = 24, width: int = 1024, vocabulary: int = 50304) -> Program:
    """Layers in bf16 and a head in float32, which is the table of the lookup."""

    def create(key: jax.Array) -> TrainState:
        stacks = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
        params = {name: jnp.zeros(shape) for name, shape in stacks.items()}
        return train_state({**params, "table": jnp.zeros((vocabulary, width))})

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> Any:
            return x + nn.gelu(x @ w["up"]) @ w["down"], None

        stacks = {name: params[name] for name in ("up", "down")}
        x = jax.lax.scan(layer, params["table"][tokens[:, :-1]], stacks)[0]
        logits = x.astype(jnp.float32) @ params["table"].astype(jnp.float32).T
        return loss_fn(logits, tokens[:, 1:])

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((devices, 513), jnp.int32)

    return Program("a head in float32", create, descend(loss), batch, lambda s: s.params)


def frozen(sizes: Language) -> Program:
    """A language model of which the optimizer moves only attention's output products."""

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: label(path), params)

    def create(key: jax.Array) -> TrainState:
        both = {"moves": optax.adamw(1e-3), "still": optax.set_to_zero()}
        return sizes.create(key, optax.partition(both, labels))

    settings = {"bf16": True, "gradient_clipping": 1.0}
    return sizes.program("a frozen base", create=create, settings=settings)


def label(path: Any) -> str:
    """The label of a frozen base's parameter."""
    return "moves" if "['attn']['c_proj']['kernel']" in jax.tree_util.keystr(path) else "still"


def used_twice(layers: int = 24, width: int = 1024, vocabulary: int = 50304) -> Program:
    """Distributions over words in and out, by one table."""

    def create(key: jax.Array) -> TrainState:
        stack = jnp.zeros((layers, width, width))
        return train_state({"stack": stack, "table": jnp.zeros((vocabulary, width))})

    def loss(params: Any, words: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(x: jax.Array, w: jax.Array) -> Any:
            return x + nn.gelu(x @ w), None

        x = words.astype(BF16) @ params["table"]
        x = jax.lax.scan(layer, x, params["stack"])[0] @ params["table"].T
        return jnp.mean(jnp.square(x.astype(jnp.float32) - words))

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((devices, 512, vocabulary), BF16)

    return Program("a table used twice", create, descend(loss), batch, lambda s: s.params)


def experts(
    *, per_device: bool, layers: int = 4, width: int = 1024, number: int = 8, tokens: int = 4096
) -> Program:
    """Experts of the tokens of all rows, or with ``per_device`` of each device's own."""

    def create(key: jax.Array) -> TrainState:
        shapes = {
            "gate": (width, number), "into": (number, width, 4 * width),
            "back": (number, 4 * width, width),
        }  # fmt: skip
        layer = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return train_state([jax.tree.map(jnp.copy, layer) for _ in range(layers)])

    def apply(x: jax.Array, chosen: jax.Array, into: jax.Array, back: jax.Array) -> jax.Array:
        rows = x.reshape(-1, width)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=number)
        hidden = nn.gelu(jax.lax.ragged_dot(rows[order], into, sizes))
        done = jax.lax.ragged_dot(hidden, back, sizes)
        return jnp.zeros_like(rows).at[order].set(done).reshape(x.shape)

    def step(each: Callable[..., jax.Array]) -> Callable[..., Any]:
        @jax.checkpoint
        def layer(x: jax.Array, w: Any) -> jax.Array:
            gates = jax.nn.softmax(x @ w["gate"])
            chosen = jnp.argmax(gates, -1)
            gate = jnp.take_along_axis(gates, chosen[..., None], -1)
            return x + gate * each(x, chosen, w["into"], w["back"])

        def loss(params: Any, x: jax.Array) -> jax.Array:
            x = x.astype(BF16)
            for w in params:
                x = layer(x, w)
            return jnp.mean(jnp.square(x.astype(jnp.float32)))

        return descend(loss)

    def bind(zero: zerojax.Zero) -> Callable[..., Any]:
        return step(zero.per_device(apply, replicated=[2, 3]))

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((devices, tokens, width), BF16)

    name = "experts of own tokens" if per_device else "experts of all tokens"
    bound = bind if per_device else None
    return Program(name, create, step(apply), batch, lambda s: s.params, bind=bound)


def taken_apart(way: str, layers: int = 16, width: int = 512) -> Program:
    """A stack of layers without ``nn.scan``: each taken "by index", in a Python loop; taken "in a
    loop", ``lax.fori_loop``; or a scan over each of two halves, "in parts"."""

    def create(key: jax.Array) -> TrainState:
        shapes = {"up": (layers, width, 4 * width), "down": (layers, 4 * width, width)}
        stacks = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        return train_state({**stacks, "bias": jnp.zeros((layers, width))})

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> jax.Array:
        hidden = jnp.tanh(x @ w["up"].astype(BF16))
        return x + hidden @ w["down"].astype(BF16) + w["bias"].astype(BF16)

    def apply(params: Any, x: jax.Array) -> jax.Array:
        def of(i: Any) -> Any:
            return jax.tree.map(lambda w: w[i], params)

        if way == "in a loop":
            return jax.lax.fori_loop(0, layers, lambda i, x: layer(x, of(i)), x)
        if way == "in parts":
            for part in (slice(None, layers // 2), slice(layers // 2, None)):
                x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, of(part))
            return x
        for i in range(layers):
            x = layer(x, of(i))
        return x

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(apply(params, x.astype(BF16)).astype(jnp.float32)))

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((devices, 256, width), jnp.float32)

    return Program(f"a stack {way}", create, descend(loss), batch, lambda s: s.params)
