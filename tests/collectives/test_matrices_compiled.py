"""What XLA:GPU compiles of Muon, also within optax's wrappers: the collectives and about the memory
of AdamW, and one all-to-all each way for each group of equal matrices, and for all others."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState

import zerojax
from zerojax.config import OptimizerConfig
from zerojax.hlo.traffic import collectives
from zerojax.optim.named import named_optimizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu_compile,
    pytest.mark.usefixtures("require_gpu_compiler"),
]

DEVICES, WIDTH, LAYERS = 8, 512, 8


def parameters() -> dict[str, jax.Array]:
    square, up = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 2 * WIDTH)
    return {name: jnp.zeros(shape) for name, shape in (("in", square), ("out", square), ("up", up))}


def with_two() -> dict[str, jax.Array]:
    """With two more matrices, which do not divide among the devices; one is as large as `up`'s."""
    two = {"first": (WIDTH, 2 * WIDTH), "last": (2 * WIDTH, WIDTH)}
    return parameters() | {name: jnp.zeros(shape) for name, shape in two.items()}


def loss_of_two(params: Any, x: jax.Array) -> jax.Array:
    x = x + jnp.tanh(x @ params["first"]) @ params["last"]
    return loss_of({name: params[name] for name in parameters()}, x)


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(x @ w["in"]) @ w["out"]
        return x + jnp.tanh(x @ w["up"])[:, :WIDTH], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


OWN = {
    "AdamW": optax.adamw(1e-3),
    "Muon": named_optimizer(OptimizerConfig(type="Muon", params={"lr": 1e-3}))[0],
}
Around = Callable[[optax.GradientTransformation], optax.GradientTransformation]


class Compiled(NamedTuple):
    """Bytes that a device sends, by kind; the number of all-to-alls; the peak of its memory."""

    sent: collections.Counter[str]
    exchanges: int
    peak: int


def compiled(optimizer: str, around: Around | None = None, *, pair: bool = False) -> Compiled:
    """With the config's optimizer, or with ``around`` one that the user builds; with
    ``pair``, in float32, a step of parameters and optimizer state."""
    zero = zerojax.zero(
        stage=3,
        bf16=not pair,
        mesh=zerojax.topology("h100", DEVICES),
        optimizer={"type": optimizer, "params": {"lr": 1e-3}},
        stage3_param_persistence_threshold=0,
    )
    tx = zero.optimizer() if around is None else around(OWN[optimizer])

    @zero
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of_two)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    def create() -> TrainState:
        return TrainState.create(apply_fn=None, params=with_two(), tx=tx)

    @zero
    def pair_step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of_two)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def create_pair() -> Any:
        return with_two(), tx.init(with_two())

    batch = jax.ShapeDtypeStruct((DEVICES * 8, WIDTH), jnp.float32)
    if pair:
        program = pair_step.lower(jax.eval_shape(create_pair), batch).compile()
    else:
        program = train_step.lower(jax.eval_shape(create), batch).compile()
    sent = collections.Counter[str]()
    found = [each for each in collectives(program.as_text()) if each.group_size > 1]
    for each in found:
        sent[each.kind] += each.moved_bytes
    memory = program.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Compiled(sent, sum(each.kind == "all-to-all" for each in found), peak)


@pytest.mark.parametrize(
    ("around", "pair"),
    [
        (None, False),
        (lambda tx: tx, False),
        (lambda tx: optax.apply_if_finite(tx, 3), True),
    ],
    ids=["config", "state of the user", "pair, apply_if_finite"],
)
def test_muon_sends_what_adamw_sends_and_its_momentum_there_and_back(
    around: Around | None, pair: bool
) -> None:
    adam, muon = (compiled(name, around, pair=pair) for name in ("AdamW", "Muon"))
    width = 2 if around is None else 4  # that of the config orthogonalizes in bf16
    own_shares = width * sum(x.size for x in parameters().values()) // DEVICES
    # Four devices compute with each of the two, and return a quarter of the result.
    two = width * 2 * WIDTH**2 * 5 // 4
    assert muon.sent.pop("all-to-all") == (2 * own_shares + two) * (DEVICES - 1) // DEVICES
    assert muon.sent == adam.sent
    assert muon.exchanges == 6  # two shapes and the two, each there and back
    assert muon.peak < 1.15 * adam.peak


def test_the_update_of_a_state_in_host_memory_sends_the_momentum_there_and_back() -> None:
    """In bf16; the matrices of the layers, each a parameter, pass through the device together."""
    zero = zerojax.zero(
        stage=3,
        bf16=True,
        mesh=zerojax.topology("h100", DEVICES),
        offload_optimizer="cpu",
        optimizer={"type": "Muon", "params": {"lr": 1e-3}},
        stage3_param_persistence_threshold=0,
    )

    def create() -> TrainState:
        layers = [{name: x[i] for name, x in parameters().items()} for i in range(LAYERS)]
        return TrainState.create(apply_fn=None, params=layers, tx=zero.optimizer())

    @zero
    def train_step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        def of(layers: Any) -> jax.Array:
            return loss_of(jax.tree.map(lambda *x: jnp.stack(x), *layers), x)

        loss, grads = jax.value_and_grad(of)(state.params)
        return state.apply_gradients(grads=grads), loss

    batch = jax.ShapeDtypeStruct((DEVICES * 8, WIDTH), jnp.float32)
    _, *updates = train_step.programs(zero.abstract_state(create), batch)
    sent = collections.Counter[str]()
    for program in updates:
        for each in collectives(program.lowered.compile().as_text()):
            if each.group_size > 1:
                sent[each.kind] += program.times * each.moved_bytes
    own_shares = 2 * sum(x.size for x in parameters().values()) // DEVICES
    assert len(updates) == 2  # two shapes
    assert sent == {"all-to-all": 2 * own_shares * (DEVICES - 1) // DEVICES}
