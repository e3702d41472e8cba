"""The forms of a training state, compiled for absent GPUs: each holds and sends the same.

    python -m benchmarks.state_forms                              # six minutes on two cores
    python -m benchmarks.state_forms --record benchmarks/records

A GPT as a flax ``TrainState``, as ``(params, opt_state)``, as a dict, and in Haiku's tree in a
``NamedTuple``; layer by layer and scanned, at stages 1 to 3. And four updates of it in a
``lax.scan``, at stage 3. Needs ``pip install -e '.[compile]'`` and no GPU.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from flax.training.train_state import TrainState

from benchmarks.compiled import Program, answer
from benchmarks.frame import Answer, question
from zerojax.models.gpt import GPT, GPTConfig

FORMS = ("TrainState", "(params, opt_state)", "dict", "Haiku's tree")
UPDATES = 4
TX = optax.adamw(1e-3)
NOTE = (
    "Compiled by XLA:GPU for absent H100s: float32, AdamW, rematerialised blocks.\n"
    "Traffic in units of 2P bytes. The state's form must change nothing."
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Layers, width and vocabulary of the GPT, rows of a device, tokens of a row."""

    layers: int
    width: int
    vocabulary: int
    rows: int
    tokens: int


FULL = Sizes(layers=4, width=512, vocabulary=2048, rows=8, tokens=256)
SMALL = Sizes(layers=2, width=256, vocabulary=512, rows=8, tokens=128)


class Learner(NamedTuple):
    """A state as Haiku's examples have it."""

    params: Any
    opt_state: Any
    steps: Any


def program(sizes: Sizes, form: str, *, scan: bool = False, updates: int = 1) -> Program:
    """The training step with its state in one of the ``FORMS``; ``updates`` of it in a loop."""
    model: Any = GPT(
        GPTConfig(
            vocab_size=sizes.vocabulary, block_size=sizes.tokens, n_layer=sizes.layers,
            n_head=sizes.width // 64, n_embd=sizes.width, scan=scan, remat=True,
        )
    )  # fmt: skip

    def init(key: jax.Array) -> Any:
        return model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def updated(params: Any, opt_state: Any, tokens: jax.Array, loss: Any = loss) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    def as_train_state(state: TrainState, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, tokens)
        return state.apply_gradients(grads=grads), value

    def as_dict(state: Any, tokens: jax.Array) -> Any:
        params, opt_state, value = updated(state["params"], state["opt_state"], tokens)
        return {"params": params, "opt_state": opt_state}, value

    def as_haiku(state: Learner, tokens: jax.Array) -> Any:
        def of_modules(params: Any, tokens: jax.Array) -> jax.Array:
            flat = {
                (*module.split("/"), name): x
                for module, arrays in params.items()
                for name, x in arrays.items()
            }
            return loss(traverse_util.unflatten_dict(flat), tokens)

        params, opt_state, value = updated(state.params, state.opt_state, tokens, of_modules)
        return Learner(params, opt_state, state.steps + 1), value

    def haiku(key: jax.Array) -> Learner:
        modules: dict[str, dict[str, Any]] = {}
        for (*module, name), x in traverse_util.flatten_dict(init(key)).items():
            modules.setdefault("/".join(module), {})[name] = x
        return Learner(modules, TX.init(modules), jnp.zeros((), jnp.int32))

    def pair(key: jax.Array) -> tuple[Any, Any]:
        params = init(key)
        return params, TX.init(params)

    def train_state(key: jax.Array) -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=init(key), tx=TX)

    forms: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[[Any], Any]]] = {
        "TrainState": (train_state, as_train_state, lambda s: s.params),
        "(params, opt_state)": (pair, updated, lambda s: s[0]),
        "dict": (
            lambda key: dict(zip(("params", "opt_state"), pair(key), strict=True)),
            as_dict,
            lambda s: s["params"],
        ),
        "Haiku's tree": (haiku, as_haiku, lambda s: s.params),
    }
    create, step, network = forms[form]
    name = f"{form}{', scanned' if scan else ''}"
    if updates > 1:
        step, name = _looped(step, updates), f"{name}, {updates} updates"

    def batch(devices: int) -> Any:
        return jax.ShapeDtypeStruct((devices * sizes.rows, sizes.tokens), jnp.int32)

    several = form == "(params, opt_state)"
    return Program(name, create, step, batch, network, several=several, settings={})


def _looped(step: Callable[..., Any], updates: int) -> Callable[..., Any]:
    """Several updates on one batch, in a loop."""

    def run(*arguments: Any) -> Any:
        *state, tokens = arguments

        def body(state: Any, _: None) -> Any:
            *state, value = step(*state, tokens)
            return tuple(state), value

        new, values = jax.lax.scan(body, tuple(state), None, length=updates)
        return (*new, values)

    return run


@question("state_forms", "Forms of the state", absent_devices=True)
def main(options: argparse.Namespace) -> Answer:
    cases = [
        (program(FULL, form, scan=scan), stage)
        for scan in (False, True)
        for stage in (3, 2, 1)
        for form in FORMS
    ]
    cases += [(program(FULL, form, updates=UPDATES), 3) for form in FORMS[:2]]
    return answer(NOTE, [(each, stage, 8) for each, stage in cases])


if __name__ == "__main__":
    main()
