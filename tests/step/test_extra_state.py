"""State beside the parameters under offload, and a teacher beside the state: as under plain jit."""

from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import assert_near, host
from flax import nnx
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, WIDTH, WIDE = 32, 16, 640
"""Rows of a batch; a matrix [WIDTH, WIDE] is just large enough to be sharded."""
TEACHER = optax.adam(1e-2)


class State(TrainState):
    """Carries a frozen base, a critic with its optimizer, an older copy, a memory of rows."""

    base: Any
    critic: Any
    critic_opt_state: Any
    average: Any
    memory: Any


def matrices(key: jax.Array, dtype: Any = None) -> Any:
    a, b = jax.random.split(key)
    return {
        "into": jax.random.normal(a, (WIDTH, WIDE), dtype) / 4,
        "out": jax.random.normal(b, (WIDE, WIDTH), dtype) / 25,
    }


def network(params: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ params["into"]) @ params["out"]


def create(key: jax.Array) -> State:
    one, two, three = jax.random.split(key, 3)
    params, critic = matrices(one), {"net": matrices(two), "scale": jnp.ones(WIDTH)}
    return State.create(
        apply_fn=None,
        params={"low": params["into"][:, :WIDTH] * 4, **params},
        tx=optax.adamw(1e-2),
        base=matrices(three),
        critic=critic,
        critic_opt_state=TEACHER.init(critic),
        average={"of": {"low": params["into"][:, :WIDTH], **params}},
        memory=jnp.zeros((WIDE, WIDTH)),
    )


def train_step(state: State, batch: Any) -> Any:
    x, y = batch["x"], batch["y"]

    def judged(critic: Any) -> jax.Array:
        made = jax.lax.stop_gradient(network(state.params, x))
        score = network(critic["net"], made) * critic["scale"]
        return jnp.mean((score - network(critic["net"], y)) ** 2) + jnp.mean(score)

    judgement, slope = jax.value_and_grad(judged)(state.critic)
    updates, critic_opt_state = TEACHER.update(slope, state.critic_opt_state, state.critic)
    critic = optax.apply_updates(state.critic, updates)

    def loss(params: Any) -> jax.Array:
        made = network(params, network(state.base, x @ params["low"]))
        taught = network(jax.lax.stop_gradient(state.average["of"]), x)
        return jnp.mean((made - y) ** 2) + jnp.mean((made - taught) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    new = state.apply_gradients(grads=grads)
    return new.replace(
        critic=critic,
        critic_opt_state=critic_opt_state,
        memory=0.9 * state.memory + jnp.mean(x, 0),
    ), {"loss": value, "judgement": judgement}


def batches(n: int = 3) -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {name: rng.normal(size=(ROWS, WIDTH)).astype(np.float64) for name in "xy"} for _ in range(n)
    ]


def fields(state: Any) -> Any:
    own = ("params", "step", "base", "critic", "critic_opt_state", "average", "memory")
    return {name: vars(state)[name] for name in own}


SINGLE = jax.tree.map(lambda x: x.astype(np.float32), batches(1)[0])
"""The rows of one batch."""


@pytest.mark.slow
def test_beside_offloaded_parameters(in_float64: None) -> None:
    both = {"offload_optimizer": "cpu", "offload_param": "cpu"}
    options = {"stage3_param_persistence_threshold": 0, "gradient_accumulation_steps": 4}
    zero = zerojax.zero(stage=3, **both, **options)
    state, step = zero.init(create, jax.random.key(0)), zero(train_step)
    want, plain_step = create(jax.random.key(0)), jax.jit(train_step)
    for batch in batches(2):
        state, _ = step(state, batch)
        want, _ = plain_step(want, batch)
    assert_near(host(fields(state)), host(fields(want)), 1e-11)
    assert not state.base["into"].sharding.is_fully_replicated


def teach_step(state: TrainState, batch: Any, teacher: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((network(params, batch["x"]) - network(teacher["net"], batch["x"])) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def test_a_teacher_as_a_further_argument() -> None:
    def start() -> TrainState:
        params = matrices(jax.random.key(0))
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    teacher = {"net": matrices(jax.random.key(3)), "scale": jnp.ones(3)}
    emitted.check(emitted.Source(start, teach_step, (SINGLE, teacher)), 3, 4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_sharded_teacher_is_gathered_where_it_is_used(accumulation: int) -> None:
    def start(seed: int = 0) -> TrainState:
        params = matrices(jax.random.key(seed))
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    sharded = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero = zerojax.zero(gradient_accumulation_steps=accumulation, **sharded)
    teacher = {"net": zero.init(start, 3).params, "scale": 2.0, "name": "teacher"}
    assert not teacher["net"]["into"].sharding.is_fully_replicated
    by_position = zero(teach_step, frozen_argnums=2), (teacher,), {}
    by_name = zero(teach_step, frozen_argnums=-1), (), {"teacher": teacher}
    (want, loss), batch = teach_step(start(), SINGLE, teacher), SINGLE
    for step, args, kwargs in (by_position, by_name):
        state, got = step(zero.init(start), batch, *args, **kwargs)
        assert_near(host(state.params), host(want.params), 1e-5)
        assert_near(host(got), host(loss), 1e-5)
        rows = step.collectives(state, batch, *args, **kwargs).rows
        gathered = [row.shape for row in rows if row.kind == "all-gather" and not row.arrays]
        assert sorted(set(gathered)) == [(WIDTH, WIDE), (WIDE, WIDTH)]


def test_frozen_arguments_that_are_not() -> None:
    zero = zerojax.zero(stage=1)
    for option in ("static", "batch", "state"):
        with pytest.raises(ValueError, match=f"frozen_argnums and {option}_argnums both name"):
            zero(teach_step, frozen_argnums=2, **{f"{option}_argnums": 2})
    with pytest.raises(TypeError, match=r"frozen_argnums names 1 \(batch\), an NNX object"):
        zero(teach_step, frozen_argnums=1)(None, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), SINGLE)
