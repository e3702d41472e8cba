"""Tables and products whose gathers, lookups and gradients ZeRO shares, rounds or leaves out.

Each gradient is written once, and trained with linen's ``TrainState`` and with NNX.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from programs.program import EQUAL, ROWS, Outcome, Program, refused

WIDTH, WIDE, WORDS = 16, 32, 512
SHAPES = {
    "into": (WIDTH, WIDE), "out": (WIDE, WIDTH), "words": (WORDS, WIDTH),
    "experts_in": (4, WIDTH, WIDE), "experts_out": (4, WIDE, WIDTH),
}  # fmt: skip
# Adam would take steps of full size where fp16 rounds a gradient of nearly zero.
TX = optax.sgd(1e-1, momentum=0.9)


def net(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["into"].astype(x.dtype)) @ p["out"].astype(x.dtype)


def error(out: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((out - y.astype(out.dtype)).astype(y.dtype) ** 2)


def taught(p: Any, extra: Any, b: Any) -> jax.Array:
    """Beside a frozen base and a copy of the parameters."""
    teacher = jax.lax.stop_gradient(net(extra["copy"], b["x"]))
    return error(net(p, net(extra["base"], b["x"])), b["y"]) + error(net(p, b["x"]), teacher)


def looked_up(p: Any, extra: Any, b: Any) -> jax.Array:
    return error(net(p, p["words"][b["ids"]]), b["y"])


def narrow(w: Any) -> Any:
    return w.astype({"float64": "float32", "float32": "float16"}.get(str(w.dtype), w.dtype))


def rounded(p: Any, extra: Any, b: Any) -> jax.Array:
    """A table that is rounded before each use, and transposed for one; wide again for the head."""
    x = net({name: narrow(p[name]) for name in ("into", "out")}, b["x"])
    return error(x @ narrow(p["words"]).astype(x.dtype).T, jnp.tile(b["y"], (1, WORDS // WIDTH)))


def tied(p: Any, extra: Any, b: Any) -> jax.Array:
    """Two products with one table."""
    x = jax.nn.softmax(jnp.tile(b["x"], (1, WORDS // WIDTH))) @ p["words"]
    return error((x + net(p, x)) @ p["words"].T, jnp.tile(b["y"], (1, WORDS // WIDTH)))


def of(loss: Any) -> Any:
    """From ``p, extra, b`` to the value and the gradients of a loss."""
    return lambda p, extra, b: zerojax.value_and_grad(lambda p: loss(p, extra, b))(p)


def curved(p: Any, extra: Any, b: Any) -> Any:
    """A gradient and its product with the Hessian."""
    first = jax.grad(lambda p: tied(p, extra, b))(p)

    def along(p: Any) -> jax.Array:
        moved = jax.jvp(lambda p: tied(p, extra, b), (p,), (jax.lax.stop_gradient(first),))
        return moved[0] + 0.1 * moved[1]

    return zerojax.value_and_grad(along)(p)


def penalized(p: Any, extra: Any, b: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        value, grads = jax.value_and_grad(lambda p: tied(p, extra, b))(p)
        return value + 0.1 * optax.tree.norm(grads, squared=True)

    return zerojax.value_and_grad(loss)(p)


def chosen(x: jax.Array, into: jax.Array, out: jax.Array) -> jax.Array:
    """[rows, D], one of the experts [E, D, F], [E, F, D] for each row -> [rows, D]."""
    which = jnp.floor(jnp.abs(10 * x[:, 0])).astype(jnp.int32) % len(into)
    order, sizes = jnp.argsort(which), jnp.bincount(which, length=len(into))
    hidden = jnp.tanh(jax.lax.ragged_dot(x[order], into.astype(x.dtype), sizes))
    done = jax.lax.ragged_dot(hidden, out.astype(x.dtype), sizes)
    return jnp.zeros_like(x).at[order].set(done)


def experts(p: Any, extra: Any, b: Any, apart: Callable[..., Any] = chosen) -> Any:
    """``apart`` runs on each device's own rows."""
    return zerojax.value_and_grad(
        lambda p: error(apart(b["x"], p["experts_in"], p["experts_out"]), b["y"])
    )(p)


def arrays(names: tuple[str, ...], seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=SHAPES[name]) / 5, np.float32) for name in names}


def beside() -> dict[str, Any]:
    return {name: arrays(("into", "out"), seed) for seed, name in ((1, "base"), (2, "copy"))}


def batch(rng: np.random.Generator) -> tuple[Any, ...]:
    x, y = (rng.normal(size=(ROWS, WIDTH)) for _ in "xy")
    return ({"x": x, "y": y, "ids": rng.integers(WORDS, size=ROWS)},)


def labels(moves: tuple[str, ...], params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "moves" if path[0].key in moves else "still", params
    )


class State(TrainState):
    extra: Any


class Still(nnx.Variable):
    """What is not trained."""


class Model(nnx.Module):
    def __init__(self, params: Any, extra: Any) -> None:
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))
        for name, values in extra.items():
            for key, value in values.items():
                setattr(self, f"{name}_{key}", Still(value))


def linen_step(gradients: Any) -> Any:
    def step(state: State, b: Any) -> Any:
        value, grads = gradients(state.params, state.extra, b)
        return state.apply_gradients(grads=grads), value

    return step


def nnx_step(gradients: Any) -> Any:
    def step(model: Any, optimizer: Any, b: Any) -> Any:
        state = nnx.state(model, nnx.Param)
        still = nnx.to_pure_dict(nnx.state(model, Still))
        extra = {
            name: {key: still[f"{name}_{key}"] for key in ("into", "out")}
            for name in ("base", "copy")
        }
        value, grads = gradients(nnx.to_pure_dict(state), extra, b)
        nnx.replace_by_pure_dict(state, grads)
        optimizer.update(model, state)
        return value

    return step


def programs(
    name: str,
    gradients: Any,
    *,
    names: tuple[str, ...] = ("into", "out", "words"),
    tx: optax.GradientTransformation = TX,
    accumulated: Outcome = EQUAL,
    near: float | None = None,
    on: Callable[[Any], Any] | None = None,
) -> tuple[Program, Program]:
    """The program in linen and in NNX; ``on(zero)`` gives the gradients as written for ``zero``."""

    def linen_state(key: jax.Array) -> State:
        params = arrays(names)
        return State.create(apply_fn=None, params=params, tx=tx, extra=beside())

    def nnx_pair(key: jax.Array) -> Any:
        model = Model(arrays(names), beside())
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def program(name: str, create: Any, wrap: Any, is_nnx: bool) -> Program:
        return Program(
            name, create, wrap(gradients), batch, accumulated=accumulated, nnx=is_nnx,
            dtypes=("float64",), near=near, step_on=on and (lambda zero: wrap(on(zero))),
        )  # fmt: skip

    return (
        program(name, linen_state, linen_step, False),
        program(f"nnx_{name}", nnx_pair, nnx_step, True),
    )


INTERACT = refused("cannot be accumulated over 4 micro-batches")
FROZEN = optax.partition(
    {"moves": TX, "still": optax.set_to_zero()}, functools.partial(labels, ("out",))
)
PROGRAMS = (
    *programs("reused_extra_state", of(taught), names=("into", "out")),
    *programs("reused_lookup", of(looked_up)),
    # Micro-batches round their gradients to float32, as the cast's own transpose does.
    *programs("reused_rounded", of(rounded), near=1e-6),
    *programs("reused_frozen", of(tied), tx=FROZEN),
    *programs("reused_twice", of(tied)),
    *programs("reused_curved", curved, accumulated=INTERACT),
    *programs("reused_penalized", penalized, accumulated=INTERACT),
    *programs(
        "reused_experts", experts, names=("experts_in", "experts_out"), accumulated=INTERACT,
        on=lambda zero: functools.partial(
            experts, apart=zero.per_device(chosen, replicated=[1, 2])
        ),
    ),
)  # fmt: skip
