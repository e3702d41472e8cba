"""Memory and traffic of state beside the parameters, compiled for absent GPUs.

    python -m benchmarks.extra_state                              # a few minutes on two cores
    python -m benchmarks.extra_state --only DPO --devices 64
    python -m benchmarks.extra_state --record benchmarks/records

A frozen base with low-rank updates (linen and NNX), a second network with its own optimizer, and a
language model beside its frozen copy, in a field and as a frozen argument of the step. Each is
compiled at stage 3, and under plain ``jax.jit`` with all arrays sharded only by ``in_shardings``.
Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from benchmarks.compiled import Program, answer
from benchmarks.frame import Answer, argument, question
from zerojax.models.gpt import GPT, GPTConfig

BF16 = jnp.bfloat16
NOTE = (
    "Compiled by XLA:GPU for absent H100s: bf16 compute with fp32 masters, Adam.\n"
    "Traffic in units of 2P bytes: the network that the extra state is, once in bf16.\n"
    "Plain jit: the same step, its state sharded as at stage 3, only by shardings."
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Layers and width of the networks, width and vocabulary of the language model, rows of a
    device, tokens of a row."""

    layers: int
    width: int
    language_width: int
    vocabulary: int
    rows: int
    tokens: int


FULL = Sizes(
    layers=24, width=2560, language_width=1536, vocabulary=32768, rows=2, tokens=1024
)  # fmt: skip
SMALL = Sizes(layers=2, width=512, language_width=512, vocabulary=2048, rows=2, tokens=128)


class BasedState(TrainState):
    """Carries a frozen base."""

    base: Any


def low_rank(sizes: Sizes, rank: int = 8, *, in_int8: bool = False) -> Program:
    """A stack of frozen residual MLPs with low-rank updates.

    With ``in_int8`` the frozen matrices are codes with a scale for each output (QLoRA)."""
    d, f = sizes.width, 4 * sizes.width

    def create(key: jax.Array) -> BasedState:
        layer = {"up": jnp.zeros((d, f)), "down": jnp.zeros((f, d))}
        updates = {
            name: {"a": jnp.zeros((n, rank)), "b": jnp.zeros((rank, m))}
            for name, (n, m) in {"up": (d, f), "down": (f, d)}.items()
        }
        if in_int8:
            codes = {name: jnp.zeros(x.shape, jnp.int8) for name, x in layer.items()}
            scales = {f"{name} scale": jnp.ones(x.shape[1]) for name, x in layer.items()}
            layer = codes | scales
        base, params = (
            [jax.tree.map(jnp.copy, each) for _ in range(sizes.layers)] for each in (layer, updates)
        )
        return BasedState.create(apply_fn=None, params=params, base=base, tx=optax.adamw(1e-3))

    def loss(params: Any, base: Any, x: jax.Array) -> jax.Array:
        for frozen, updates in zip(base, params, strict=True):

            def dense(x: jax.Array, name: str, frozen: Any = frozen, low: Any = updates) -> Any:
                w = frozen[name].astype(BF16)
                w = w * frozen[f"{name} scale"].astype(BF16) if in_int8 else w
                return x @ w + x @ low[name]["a"] @ low[name]["b"]

            x = x + dense(nn.gelu(dense(x, "up")), "down")
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(state: BasedState, batch: jax.Array) -> Any:
        low = jax.tree.map(lambda x: x.astype(BF16), state.params)
        value, grads = jax.value_and_grad(loss)(low, state.base, batch.astype(BF16))
        return state.apply_gradients(grads=grads), value

    name = f"LoRA, base in {'int8' if in_int8 else 'a field'}"
    return Program(name, create, step, _features(sizes), lambda s: s.base)


def low_rank_nnx(sizes: Sizes) -> Program:
    """The program with flax's own layers, of which the optimizer trains the updates."""
    d, f = sizes.width, 4 * sizes.width

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            layer = functools.partial(nnx.LoRALinear, lora_rank=8, dtype=BF16, rngs=rngs)
            self.up = nnx.List([layer(d, f) for _ in range(sizes.layers)])
            self.down = nnx.List([layer(f, d) for _ in range(sizes.layers)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for up, down in zip(self.up, self.down, strict=True):
                x = x + down(nn.gelu(up(x)))
            return x

    def create(key: jax.Array) -> Any:
        model = Model(nnx.Rngs(key))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam)

    def step(model: Any, optimizer: Any, batch: jax.Array) -> Any:
        def loss(model: Any) -> jax.Array:
            return jnp.mean(jnp.square(model(batch.astype(BF16)).astype(jnp.float32)))

        of = nnx.DiffState(0, nnx.LoRAParam)
        value, grads = nnx.value_and_grad(loss, argnums=of)(model)
        optimizer.update(model, grads)
        return value

    def base(state: Any) -> Any:
        return nnx.state(state[0], lambda path, x: path[-1] == "kernel")

    return Program("LoRA, nnx.LoRALinear", create, step, _features(sizes), base, several=True)


class Dense(nn.Module):
    """[B, T, D] -> [B, T, out]."""

    layers: int
    width: int
    out: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(BF16)
        for _ in range(self.layers):
            x = nn.gelu(nn.Dense(self.width, dtype=BF16)(x))
        return nn.Dense(self.out, dtype=BF16)(x).astype(jnp.float32)


class AdversarialState(TrainState):
    """Carries a second network and its optimizer's state."""

    critic: Any
    critic_opt_state: Any


def adversarial(sizes: Sizes) -> Program:
    """A generator, and a critic that is trained in the same step."""
    d, tx = sizes.width, optax.adam(1e-4)
    layers = max(2, sizes.layers // 4)
    generator: Any = Dense(layers, d, d)
    critic: Any = Dense(layers, d, 1)

    def create(key: jax.Array) -> AdversarialState:
        params, second = (
            net.init(key, jnp.zeros((1, 1, d)))["params"] for net in (generator, critic)
        )
        return AdversarialState.create(
            apply_fn=None, params=params, tx=tx, critic=second, critic_opt_state=tx.init(second)
        )

    def judged(critic_params: Any, x: jax.Array) -> Any:
        return critic.apply({"params": critic_params}, x)

    def step(state: AdversarialState, batch: jax.Array) -> Any:
        def critic_loss(params: Any) -> jax.Array:
            drawn = generator.apply({"params": state.params}, batch)
            return jnp.mean(
                nn.softplus(judged(params, drawn)) + nn.softplus(-judged(params, batch))
            )

        judgement, slope = jax.value_and_grad(critic_loss)(state.critic)
        updates, opt_state = tx.update(slope, state.critic_opt_state)

        def loss(params: Any) -> jax.Array:
            drawn = generator.apply({"params": params}, batch)
            return jnp.mean(nn.softplus(-judged(state.critic, drawn)))

        value, grads = jax.value_and_grad(loss)(state.params)
        new = state.apply_gradients(grads=grads, critic_opt_state=opt_state)
        return new.replace(critic=optax.apply_updates(state.critic, updates)), (value, judgement)

    return Program("GAN", create, step, _features(sizes), lambda s: s.critic)


class ReferredState(TrainState):
    """Carries a frozen copy of its parameters."""

    reference: Any = None


def preference(sizes: Sizes, *, in_field: bool) -> Program:
    """Direct preference optimization: a language model beside its frozen copy, pairs of rows.

    Source: Rafailov et al. 2023, Direct Preference Optimization (arXiv:2305.18290).
    """
    model: Any = GPT(
        GPTConfig(
            vocab_size=sizes.vocabulary, block_size=sizes.tokens, n_layer=sizes.layers,
            n_head=sizes.language_width // 64, n_embd=sizes.language_width, scan=True, remat=True,
        )
    )  # fmt: skip

    def create(key: jax.Array) -> ReferredState:
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        reference = jax.tree.map(jnp.copy, params) if in_field else None
        return ReferredState.create(
            apply_fn=None, params=params, reference=reference, tx=optax.adamw(1e-5)
        )

    def score(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        chosen = jnp.take_along_axis(nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return jnp.sum(chosen[..., 0], -1)

    def step(state: ReferredState, batch: Any, *frozen: Any) -> Any:
        (reference,) = frozen or (state.reference,)
        reference = jax.tree.map(lambda x: x.astype(BF16), reference)
        fixed = [jax.lax.stop_gradient(score(reference, x)) for x in batch]

        def loss(params: Any) -> jax.Array:
            low = jax.tree.map(lambda x: x.astype(BF16), params)
            better, worse = (score(low, x) - y for x, y in zip(batch, fixed, strict=True))
            return -jnp.mean(nn.log_sigmoid(0.1 * (better - worse)))

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    def batch(devices: int) -> Any:
        rows = jax.ShapeDtypeStruct((devices * sizes.rows, sizes.tokens + 1), jnp.int32)
        return rows, rows

    name = f"DPO, the copy {'in a field' if in_field else 'an argument'}"
    frozen = None if in_field else lambda state: state.params
    return Program(name, create, step, batch, lambda s: s.params, frozen)


def _features(sizes: Sizes) -> Callable[[int], Any]:
    def batch(devices: int) -> Any:
        shape = (devices * sizes.rows, sizes.tokens, sizes.width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return batch


def programs(sizes: Sizes) -> tuple[Program, ...]:
    """All programs that this benchmark compiles."""
    return (
        low_rank(sizes),
        low_rank_nnx(sizes),
        adversarial(sizes),
        preference(sizes, in_field=True),
        preference(sizes, in_field=False),
    )


@question(
    "extra_state",
    "State beside the parameters",
    argument("--only", action="append", metavar="NAME", help="may be repeated"),
    argument("--devices", type=int, action="append", help="8 and 64 by default"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    cases: list[tuple[Program, int | None, int]] = [
        (program, stage, devices)
        for program in programs(FULL)
        if not options.only or program.name.startswith(tuple(options.only))
        for devices in options.devices or (8, 64)
        for stage in (3, None)
        if not (stage is None and program.several)
    ]
    return answer(NOTE, cases)


if __name__ == "__main__":
    main()
