"""A short training run of two processes, one of which differs; benchmarks.differences starts it.

python -m zerojax launch --nproc-per-node 2 -m benchmarks.differing '{"kind": "length", ...}'
"""

import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer

ROWS, TOKENS, WIDTH, STEPS = 8, 12, 16, 6


class Difference(NamedTuple):
    """A difference between process ``who`` and the other.

    Attributes:
      kind: What differs, of ``KINDS``.
      who: The process that differs.
      at: The step from which it differs, from 0.
      lasts: Whether it differs in all further steps too.
      stage: Stage of both processes.
      micro_batches: Micro-batches of a step of both.
      late: The process that sleeps before step ``at``; -1 for none.
      seconds: Seconds of this sleep.
    """

    kind: str
    who: int
    at: int
    lasts: bool
    stage: int
    micro_batches: int
    late: int
    seconds: float

    def holds(self, kind: str, process: int, step: int) -> bool:
        """Returns whether a process differs at a step in this kind."""
        is_now = step >= self.at if self.lasts else step == self.at
        return kind == self.kind and process == self.who and is_now


def _batch(**changed: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda batch: {k: changed[k](x) if k in changed else x for k, x in batch.items()}


def _half(x: Any) -> Any:
    return x[: len(x) // 2]


BATCHES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "length": _batch(x=lambda x: x[:, :8]),
    "rows": _batch(x=_half, y=_half, w=_half),
    "dtype of x": _batch(x=np.float16),
    "dtype of labels": _batch(y=np.uint8),
    "dimensions": _batch(w=lambda x: x[:, None]),
    "an extra leaf": lambda batch: {**batch, "more": batch["w"]},
    "a leaf less": lambda batch: {k: x for k, x in batch.items() if k != "w"},
    "None for a leaf": _batch(w=lambda _: None),
    "a scalar leaf": _batch(scale=lambda x: 2 * x),
    "order of the dict": lambda batch: dict(reversed(batch.items())),
    "jax arrays": lambda batch: jax.tree.map(jnp.asarray, batch),
}
FURTHER: dict[str, Callable[[], dict[str, Any]]] = {  # arrays of JAX only once JAX has joined
    "a static argument": lambda: {"mode": "sum"},
    "a number": lambda: {"rate": 0.5},
    "an array for a number": lambda: {"rate": jnp.ones(())},
    "the value of a host array": lambda: {"noise": np.full(1, 0.5, np.float32)},
    "the value of an array": lambda: {"noise": jnp.full(1, 0.5, np.float32)},
    "a weak type": lambda: {"noise": jnp.full((1,), 0.0)},
    "dtype of an argument": lambda: {"noise": np.zeros(1, np.float16)},
    "order of keywords": dict,
    "by position": dict,
}
SETUP: dict[str, dict[str, Any]] = {
    "clipping": {"gradient_clipping": 0.1},
    "accumulation": {"gradient_accumulation_steps": 4},
    "stage": {},
    "parameter dtype": {},
    "width": {},
    "optimizer": {},
    "learning rate": {},
    "seed": {},
}
CALLS = (
    "an evaluation more",
    "a step fewer",
    "a step more",
    "order of two steps",
    "order of two batches",
    "a save",
    "an exception",
    "sys.exit(0)",
    "parameters cast",
    "parameters scaled",
    "only late",
)
KINDS = (*BATCHES, *FURTHER, *SETUP, *CALLS)


def rows_of(difference: Difference, process: int, step: int) -> dict[str, Any]:
    """Returns a process's part of the batch of a step."""
    if difference.kind == "order of two batches" and process == difference.who:
        step = {difference.at: step + 1, difference.at + 1: step - 1}.get(step, step)
    of = np.random.default_rng(step)
    batch: dict[str, Any] = {
        "x": of.normal(size=(ROWS, TOKENS, WIDTH)).astype(np.float32),
        "y": of.integers(0, 4, ROWS).astype(np.int32),
        "w": of.uniform(0.5, 1.5, ROWS).astype(np.float32),
    }
    half = ROWS // 2
    batch = {k: x[half * process :][:half] for k, x in batch.items()} | {"scale": np.float32(1)}
    for kind, changed in BATCHES.items():
        if difference.holds(kind, process, step):
            batch = changed(batch)
    return batch


def create_state(kind: str = "") -> TrainState:
    """Returns the state before the first step, which may differ in a kind."""
    width = 2 * WIDTH if kind == "width" else WIDTH
    dtype = jnp.bfloat16 if kind == "parameter dtype" else jnp.float32
    model = nn.Sequential([nn.Dense(width, param_dtype=dtype), nn.relu, nn.Dense(4)])
    params = model.init(jax.random.key(kind == "seed"), jnp.zeros((1, WIDTH)))["params"]
    rate = 2e-2 if kind == "learning rate" else 1e-2
    tx = optax.sgd(rate) if kind == "optimizer" else optax.adam(rate)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def loss_of(state: TrainState, params: Any, batch: dict[str, Any], scale: Any) -> jax.Array:
    logits = state.apply_fn({"params": params}, batch["x"]).mean(1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    weights = batch.get("w")
    weights = 1.0 if weights is None else weights.reshape(-1)
    return scale * batch["scale"] * (losses * weights).mean()


def train_step(
    state: TrainState, batch: dict[str, Any], rate: Any = 1.0, noise: Any = 0.0, mode: str = "mean"
) -> tuple[TrainState, jax.Array]:
    scale = rate * (1 + jnp.sum(jnp.asarray(noise))) * (2.0 if mode == "sum" else 1.0)
    loss, grads = jax.value_and_grad(lambda params: loss_of(state, params, batch, scale))(
        state.params
    )
    return state.apply_gradients(grads=grads), loss


def regularized(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, jax.Array]:
    """A second step, which stands in one process before the first."""
    loss, grads = jax.value_and_grad(lambda params: loss_of(state, params, batch, 3.0))(
        state.params
    )
    return state.apply_gradients(grads=grads), loss


def train(difference: Difference, process: int, zero: zerojax.Zero) -> Iterator[tuple[int, Any]]:
    """Yields each step with its loss."""
    kind, at = difference.kind, difference.at
    differs = process == difference.who
    step_of = zero(train_step, static_argnames="mode")
    second, evaluate = zero(regularized), zero.evaluate(lambda s, b: loss_of(s, s.params, b, 1.0))
    state = zero.init(functools.partial(create_state, kind if differs else ""))
    steps = STEPS
    if differs and kind in ("a step fewer", "a step more"):
        steps = at if kind == "a step fewer" else STEPS + 1
    for step in range(steps):
        batch = rows_of(difference, process, step)
        if difference.late == process and step == at:
            time.sleep(difference.seconds)
        now = difference.holds(kind, process, step)
        if now or (kind == "a step more" and step == STEPS):
            print(f"differs at {time.time()}", flush=True)
        if now and kind == "an evaluation more":
            evaluate(state, batch)
        if now and kind == "a save":
            Checkpointer(tempfile.mkdtemp(), zero).save(1, state)
        if now and kind.startswith("parameters "):
            changed = (lambda x: x.astype(jnp.bfloat16)) if "cast" in kind else (lambda x: x / 2)
            state = state.replace(params=jax.tree.map(changed, state.params))
        if now and kind == "an exception":
            raise RuntimeError("no rows are left")
        if now and kind == "sys.exit(0)":
            sys.exit(0)
        more: dict[str, Any] = {"rate": 1.0, "noise": np.zeros(1, np.float32), "mode": "mean"}
        args: tuple[Any, ...] = (batch,)
        if now:
            more |= FURTHER.get(kind, dict)()
            if kind == "order of keywords":
                more = dict(reversed(more.items()))
            if kind == "by position":
                args = (batch, more.pop("rate"))
        has_two = kind == "order of two steps"
        if has_two and now:
            state, _ = second(state, batch)
        state, loss = step_of(state, *args, **more)
        if has_two and not now:
            state, _ = second(state, batch)
        yield step, loss
    if kind == "a step fewer" and differs:
        print(f"differs at {time.time()}", flush=True)


def main() -> None:
    difference = Difference(**json.loads(sys.argv[1]))
    zerojax.init_distributed()
    process = jax.process_index()
    config: dict[str, Any] = {"stage": difference.stage, "stage3_param_persistence_threshold": 0}
    config["gradient_accumulation_steps"] = difference.micro_batches
    if process == difference.who:
        config |= SETUP.get(difference.kind, {})
        config["stage"] = (difference.stage + (difference.kind == "stage")) % 4
        if difference.kind in SETUP:
            print(f"differs at {time.time()}", flush=True)
    for step, loss in train(difference, process, zerojax.zero(**config)):
        print(f"step {step} loss {float(loss):.9g}", flush=True)


def plain(difference: Difference) -> dict[int, float]:
    """Losses of one plain process on the whole batch, where one has such a batch."""
    step_of, state, losses = jax.jit(train_step), create_state(), {}
    for step in range(STEPS):
        parts = [rows_of(difference._replace(kind=_same(difference)), i, step) for i in range(2)]
        batch = {k: np.concatenate([p[k] for p in parts]) for k in parts[0] if k != "scale"}
        state, loss = step_of(state, {**batch, "scale": np.float32(1)})
        losses[step] = float(loss)
    return losses


def _same(difference: Difference) -> str:
    return difference.kind if difference.kind == "order of two batches" else ""


if __name__ == "__main__":
    main()
