"""Steps put together at random compute what plain jit computes, unsplit or by micro-batch, in exact
arithmetic (``tests/exact.py``)."""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax

import zerojax

ROWS, WIDTH, LAYERS = 8, 4, 2


@dataclass(frozen=True)
class Blocks:
    """What a step is put together from.

    Attributes:
      network: how the layers are applied.
      loss: what is made of the rows' losses.
      regularized: whether the parameters' squares are added to it.
      second: whether another gradient is added to the first, and where it is taken: here, or there
        where the first leads.
      average: what happens to the second set of parameters: nothing, the average of all, the
        average before the gradients, a copy every second step.
      read: whether the loss reads it.
      backward: what a backward function of the user's own makes of the outputs' gradients.
      shaping: what is made of the gradients.
      guard: how a step that is not finite is left out; such a batch comes where there is a guard.
      frozen: how the bias is held still.
      optimizer: which of ``OPTIMIZERS``.
      extra: whether counters and a running loss are carried.
      results: which of ``RESULTS`` the step returns.
    """

    network: str
    loss: str
    regularized: bool
    second: str
    average: str
    read: bool
    backward: str
    shaping: str
    guard: str
    frozen: str
    optimizer: str
    extra: bool
    results: tuple[str, ...]

    @property
    def interact(self) -> bool:
        """Whether rows meet in another way than by sums and means."""
        meet = self.backward in ("normalized", "centred")
        return meet or self.loss == "above" or self.second == "there"

    @property
    def hard(self) -> bool:
        """Whether it may be refused: a loop over chunks of rows is not always seen through."""
        return self.interact or self.network == "chunks"


OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "decayed": optax.adamw(1e-2, weight_decay=0.1),
    "multi_transform": optax.multi_transform(
        {"moves": optax.sgd(0.1), "still": optax.set_to_zero()},
        lambda params: {name: "still" if name == "bias" else "moves" for name in params},
    ),
}
RESULTS = (
    "rows", "mean", "sum", "most", "least", "any", "all", "count", "step", "norm", "weights",
    "masked", "distance",
)  # fmt: skip

CHOICES: dict[str, tuple[Any, ...]] = {
    "network": ("unrolled", "scanned", "looped", "remat", "tied", "chunks", "vmap"),
    "loss": ("mean", "masked", "weighted", "sum", "by_rows", "clamped", "above"),
    "regularized": (False, True),
    "second": ("none", "here", "none", "here", "there"),
    "average": ("none", "after", "before", "copied"),
    "read": (False, True),
    "backward": ("none", "clipped", "none", "wide", "none", "normalized", "none", "centred"),
    "shaping": ("none", "clip", "normalize", "by_loss", "cond", "decay"),
    "guard": ("none", "where", "params", "cond"),
    "frozen": ("none", "stop_gradient", "zeros"),
    "optimizer": tuple(sorted(OPTIMIZERS)),
    "extra": (False, True),
}


def drawn(number: int) -> tuple[Blocks, int, int]:
    """Blocks, a stage and a number of micro-batches. In the first 150, 98 of a hundred pairs of
    choices meet, and three of four triples."""
    rng = random.Random(number)
    chosen = {name: rng.choice(choices) for name, choices in CHOICES.items()}
    results = tuple(sorted(rng.sample(RESULTS, rng.randrange(6))))
    return Blocks(**chosen, results=results), rng.choice((0, 1, 2, 3)), rng.choice((4, 2, 1))


class State(TrainState):
    """Carries a second set of parameters, counters, and a running loss."""

    average: Any
    seen: Any
    finite: Any
    running: Any


def create(blocks: Blocks) -> State:
    rng = np.random.default_rng(3)
    params = {
        "layers": rng.normal(size=(LAYERS, WIDTH, WIDTH)),
        "bias": rng.normal(size=WIDTH),
        "head": rng.normal(size=(WIDTH, WIDTH)),
    }
    params = jax.tree.map(lambda x: jnp.asarray(0.5 * x), params)
    zero = jnp.zeros((), jnp.int32)
    return State.create(
        apply_fn=None, params=params, tx=OPTIMIZERS[blocks.optimizer],
        average=jax.tree.map(lambda x: 0.5 * x, params), seen=zero, finite=zero,
        running=jnp.zeros(()),
    ).replace(step=zero)  # fmt: skip


def apply(network: str, params: Any, x: jax.Array) -> jax.Array:
    """[rows, 4] -> [rows, 4]"""
    layers, bias = params["layers"], params["bias"]

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w + bias)

    if network == "unrolled":
        x = layer(layer(x, layers[0]), layers[1])
    elif network == "scanned":
        x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, layers)
    elif network == "looped":
        x = lax.fori_loop(0, LAYERS, lambda i, x: layer(x, layers[i]), x)
    elif network == "remat":
        x, _ = lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, layers)
    elif network == "tied":
        x = layer(layer(x, layers[0]), layers[0].T) @ params["head"].T
    elif network == "chunks":
        chunks = x.reshape(-1, 1, WIDTH)
        x = lax.map(lambda x: layer(layer(x, layers[0]), layers[1]), chunks).reshape(x.shape)
    else:
        x = jax.vmap(lambda x: layer(layer(x, layers[1]), layers[0]))(x)
    return x @ params["head"]


def reduced(loss: str, rows: jax.Array, mask: jax.Array) -> jax.Array:
    """The loss of a batch from that of its rows."""
    return {
        "mean": lambda: rows.mean(),
        "masked": lambda: jnp.sum(rows * mask) / jnp.sum(mask),
        "weighted": lambda: zerojax.weighted_mean(rows, mask),
        "sum": lambda: 0.1 * jnp.sum(rows),
        "by_rows": lambda: jnp.sum(rows * mask) / len(rows),
        "clamped": lambda: jnp.sum(rows * mask) / jnp.maximum(jnp.sum(mask), 1),
        "above": lambda: jnp.mean(jnp.where(rows > lax.stop_gradient(rows.mean()), rows, 0)),
    }[loss]()


def with_backward(backward: str, remat: bool) -> Callable[[jax.Array], jax.Array]:
    """The identity on [rows, 4], and another backward pass."""

    @jax.custom_vjp
    def identity(x: jax.Array) -> jax.Array:
        return x

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        return ({
            "none": lambda: g,
            "clipped": lambda: g * jnp.minimum(1, 0.1 / jnp.linalg.norm(g, axis=-1, keepdims=True)),
            "wide": lambda: g * len(g),
            "normalized": lambda: g / (1e-3 + jnp.linalg.norm(g)),
            "centred": lambda: g - g.mean(0),
        }[backward](),)  # fmt: skip

    identity.defvjp(lambda x: (x, None), back)
    return jax.checkpoint(identity) if remat else identity


def shaped(shaping: str, grads: Any, loss: jax.Array, params: Any) -> Any:
    """Gradients changed by what follows from them, or from the loss."""
    norm = optax.tree.norm(grads)
    return {
        "none": lambda: grads,
        "clip": lambda: optax.tree.scale(jnp.minimum(1, 0.3 / norm), grads),
        "normalize": lambda: jax.tree.map(lambda g: g / norm, grads),
        "by_loss": lambda: optax.tree.scale(loss, grads),
        "cond": lambda: lax.cond(norm > 1, lambda g: optax.tree.scale(0.5, g), lambda g: g, grads),
        "decay": lambda: jax.tree.map(lambda g, p: g + 0.1 * p, grads, params),
    }[shaping]()


def assembled(blocks: Blocks) -> Callable[..., Any]:
    """The step."""

    def held(params: Any) -> Any:
        if blocks.frozen != "stop_gradient":
            return params
        return params | {"bias": lax.stop_gradient(params["bias"])}

    def step(state: State, batch: Any) -> tuple[State, Any]:
        if blocks.average == "before":
            state = state.replace(average=mixed(state.average, state.params))

        def loss_fn(params: Any) -> Any:
            params = held(params)
            made = apply(blocks.network, params, batch["x"])
            made = with_backward(blocks.backward, blocks.network == "remat")(made)
            loss = reduced(blocks.loss, jnp.mean((made - batch["y"]) ** 2, -1), batch["mask"])
            if blocks.regularized:
                loss = loss + 0.1 * optax.tree.norm(params, squared=True)
            if blocks.read:
                taught = apply(blocks.network, state.average, batch["x"])
                loss = loss + jnp.mean((made - taught) ** 2)
            return loss, made

        (loss, made), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        if blocks.second != "none":
            there = state.params
            if blocks.second == "there":
                there = jax.tree.map(lambda p, g: p - 0.1 * g, there, grads)
            more = jax.grad(
                lambda p: reduced(
                    blocks.loss, jnp.abs(apply(blocks.network, p, batch["y2"])).sum(-1),
                    batch["mask"],
                )
            )(there)  # fmt: skip
            grads = jax.tree.map(lambda a, b: a + 0.1 * b, grads, more)
        if blocks.frozen == "zeros":
            grads = grads | {"bias": jnp.zeros_like(grads["bias"])}
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss)
        grads = shaped(blocks.shaping, grads, loss, state.params)
        new = guarded(blocks.guard, finite, state, grads)
        if blocks.average == "after":
            new = new.replace(average=mixed(new.average, new.params))
        if blocks.average == "copied":
            new = new.replace(
                average=lax.cond(
                    new.step % 2 == 0, lambda a, b: a, lambda a, b: b, new.params, new.average
                )
            )
        if blocks.extra:
            running = 0.9 * state.running + 0.1 * jnp.where(finite, loss, 0)
            seen = state.seen + (batch["mask"] > 0).sum().astype(jnp.int32)
            new = new.replace(running=running, seen=seen, finite=state.finite + finite)
        every = results(made, batch, new, norm)
        out = {name: every[name] for name in blocks.results}
        return new, out | {"loss": jnp.where(finite, loss, 0)}

    return step


def mixed(old: Any, new: Any) -> Any:
    return jax.tree.map(lambda a, p: 0.7 * a + 0.3 * p, old, new)


def guarded(guard: str, finite: jax.Array, state: State, grads: Any) -> State:
    """The update, left out where it is not finite."""
    if guard == "cond":
        return lax.cond(
            finite, lambda s, g: s.apply_gradients(grads=g), lambda s, g: s, state, grads
        )
    new = state.apply_gradients(grads=grads)

    def keep(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)

    if guard == "where":
        return keep(new, state)
    if guard == "params":
        return new.replace(
            params=keep(new.params, state.params), opt_state=keep(new.opt_state, state.opt_state)
        )
    return new


def results(made: jax.Array, batch: Any, new: State, norm: jax.Array) -> Any:
    error = jnp.abs(made - batch["x"])
    rows = error.mean(-1)
    return {
        "rows": rows,
        "mean": error.mean(),
        "sum": rows.sum(),
        "most": error.max(),
        "least": error.min(),
        "any": (error > 2).any(),
        "all": (error < 2).all(),
        "count": (rows > 0.5).sum(),
        "step": new.step,
        "norm": jnp.where(jnp.isfinite(norm), norm, -1),
        "weights": optax.tree.norm(new.params),
        "masked": (rows * batch["mask"]).sum() / batch["mask"].sum(),
        "distance": optax.tree.norm(jax.tree.map(jnp.subtract, new.params, new.average)),
    }


def batch(blocks: Blocks) -> Any:
    """The second micro-batch has no weight; a row is not finite where there is a guard."""
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(ROWS, WIDTH)) for name in ("x", "y", "y2")}
    mask = (rng.random(ROWS) < 0.6).astype(np.float64)
    mask[[0, 1]], mask[[2, 3]] = 1, 0
    if blocks.guard != "none":
        batch["y"][5, 1], mask[5] = np.inf, 1
    return emitted.in_float32(batch | {"mask": mask})


def check(blocks: Blocks, stage: int, k: int) -> None:
    create_state = functools.partial(create, blocks)
    source = emitted.Source(create_state, assembled(blocks), (batch(blocks),), rows=ROWS)
    try:
        emitted.check(source, stage, k, zerojax.mesh(2), small_array_size=0)
    except ValueError as e:
        told = f"cannot be accumulated over {k} micro-batches" in str(e)
        if k == 1 or not (blocks.hard and told):
            raise
        return
    assert k == 1 or not blocks.interact


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=pytest.mark.sweep if n >= 30 else ()) for n in range(150)]
)
def test_a_step(number: int) -> None:
    check(*drawn(number))
