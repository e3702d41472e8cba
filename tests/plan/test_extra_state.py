"""How state beside the parameters lies: what is sharded, at which stage, and what is said of it."""

import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import zerojax

P = PartitionSpec
ADAM = optax.adam(1e-3)


class State(TrainState):
    """Carries a frozen base, an average, a second network with its optimizer, and little things."""

    base: Any
    average: Any
    critic: TrainState
    critic_opt_state: Any
    mean: Any
    keys: Any


def create() -> State:
    params = {"w": jnp.ones((640, 256)), "b": jnp.ones(256)}
    second = {"w": jnp.ones((256, 512))}
    return State.create(
        apply_fn=None,
        params=params,
        tx=ADAM,
        base={"up": jnp.ones((256, 1024)), "bias": jnp.ones(1024)},
        average={"decay": jnp.ones(()), "of": jax.tree.map(jnp.copy, params)},
        critic=TrainState.create(apply_fn=None, params=second, tx=ADAM),
        critic_opt_state=(ADAM.init(second), {"own": jnp.ones((256, 512))}),
        mean=jnp.ones(8192),
        keys=jax.random.split(jax.random.key(0), 10_000),
    )


def planned(stage: int, **options: Any) -> Any:
    zero = zerojax.zero(stage=stage, **options)
    return zero.plan(zero.abstract_state(create))


def test_stage_3_shards_all_that_is_large() -> None:
    rest = planned(3).rest
    assert rest["base"] == {"up": P(None, "data"), "bias": P()}
    assert rest["critic"].params == {"w": P(None, "data")}
    assert rest["critic"].opt_state[0].mu == {"w": P(None, "data")}
    assert rest["critic_opt_state"][1] == {"own": P(None, "data")}
    assert rest["mean"] == rest["keys"] == P()


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_shard_what_an_optimizer_owns(stage: int) -> None:
    rest = planned(stage).rest
    assert rest["base"] == {"up": P(), "bias": P()}
    assert rest["critic"].params == {"w": P()}
    for moments in (rest["critic"].opt_state[0], rest["critic_opt_state"][0][0]):
        assert moments.nu == {"w": P(None, "data")}
        assert moments.count == P()
    assert rest["critic_opt_state"][1] == {"own": P(None, "data")}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_copy_of_the_parameters_lies_as_they_do_wherever_it_stands(stage: int) -> None:
    plan = planned(stage)
    assert plan.rest["average"] == {"decay": P(), "of": plan.params}
    assert plan.params["w"] == P("data")


def test_stage_0_keeps_everything_replicated() -> None:
    plan = planned(0)
    assert not any(leaf.sharded for leaf in plan.leaves["rest"])


def test_the_threshold_of_the_parameters_holds() -> None:
    plan = planned(3, stage3_param_persistence_threshold=200_000)
    up = next(leaf for leaf in plan.leaves["rest"] if leaf.path == "base['up']")
    assert up.sharded
    own = next(leaf for leaf in plan.leaves["rest"] if leaf.path.endswith("['own']"))
    assert own.spec == P()
    assert "stage3_param_persistence_threshold" in own.reason


class Frozen(TrainState):
    base: Any


def create_frozen() -> Frozen:
    params = {"w": jnp.ones((128, 128))}
    return Frozen.create(
        apply_fn=None, params=params, tx=ADAM, base=[jnp.ones((4096, 4096)), jnp.ones(3)]
    )


@pytest.mark.parametrize(("stage", "told"), [(0, False), (2, True), (3, False)])
def test_much_that_stays_replicated_is_told_once(
    stage: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    zero = zerojax.zero(stage=stage)
    with caplog.at_level(logging.WARNING, "zerojax"):
        state = zero.abstract_state(create_frozen)
        plan = zero.plan(state)
    says = "67.1 MB of state beside the parameters is replicated on each device"
    lines = [r.getMessage() for r in caplog.records]
    assert sum(says in line for line in lines) == told
    assert (says in str(plan).splitlines()[1]) == told
    assert all("base[0] (4096, 4096) (stage 2 replicates" in line for line in lines)


def test_variables_that_the_optimizer_does_not_train() -> None:
    """nnx.LoRA with ``wrt=nnx.LoRAParam``: the base is extra state."""

    def create() -> Any:
        model = nnx.LoRALinear(256, 1024, lora_rank=4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, ADAM, wrt=nnx.LoRAParam)

    zero = zerojax.zero(stage=3)
    model, _ = zero.init(create)
    kernel = model.kernel[...]
    assert kernel.sharding.spec == P(None, "data")
    assert model.bias[...].sharding.is_fully_replicated
