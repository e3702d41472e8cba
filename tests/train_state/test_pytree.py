"""Any pytree is a state: plain jit's numbers, sharded as the stage says, or an error that says what
to write."""

from collections.abc import Callable
from typing import Any, NamedTuple

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import TOLERANCE, assert_near, host, zero_for
from flax import struct
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS, WIDTH, HIDDEN = 32, 8, 48
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)), strict=True))


def network(seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed))
    return {
        "in": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 3,
        "out": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 6,
    }


def output(params: Any, x: Any) -> jax.Array:
    return jnp.tanh(x @ params["in"]) @ params["out"]


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((output(params, batch["x"]) - batch["y"]) ** 2)


def updated(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


class Learner(NamedTuple):
    params: Any
    opt_state: Any
    steps: Any


@struct.dataclass
class Pair:
    """Two networks, as a class holds them."""

    generator: TrainState
    critic: TrainState


def train_state(seed: int) -> TrainState:
    return TrainState.create(apply_fn=output, params=network(seed), tx=TX)


def as_arguments(params: Any, opt_state: Any, batch: Any) -> Any:
    return updated(params, opt_state, batch)


def as_dict(state: Any, batch: Any) -> Any:
    params, opt_state, loss = updated(state["params"], state["opt"], batch)
    return {"params": params, "opt": opt_state, "step": state["step"] + 1}, {"loss": loss}


def as_named_tuple(state: Learner, batch: Any) -> Any:
    params, opt_state, loss = updated(state.params, state.opt_state, batch)
    return loss, Learner(params, opt_state, state.steps + 1)


def batch_first(batch: Any, params: Any, opt_state: Any) -> Any:
    params, opt_state, loss = updated(params, opt_state, batch)
    return {"loss": loss, "new": [params, opt_state]}


def adversaries(generator: TrainState, critic: TrainState, batch: Any) -> Any:
    """The critic's update reads the generator's new parameters."""

    def fooled(params: Any) -> jax.Array:
        return jnp.mean(output(critic.params, output(params, batch["x"])) ** 2)

    first, grads = jax.value_and_grad(fooled)(generator.params)
    generator = generator.apply_gradients(grads=grads)

    def told(params: Any) -> jax.Array:
        made = output(generator.params, batch["x"])
        return jnp.mean((output(params, made) - output(params, batch["y"]) - 1) ** 2)

    second, grads = jax.value_and_grad(told)(critic.params)
    return generator, critic.apply_gradients(grads=grads), {"g": first, "c": second}


def in_a_class(pair: Pair, batch: Any) -> Any:
    generator, critic, losses = adversaries(pair.generator, pair.critic, batch)
    return Pair(generator, critic), losses


def pair() -> tuple[TrainState, TrainState]:
    return train_state(0), train_state(1)


def params_and_opt_state() -> tuple[Any, Any]:
    params = network(0)
    return params, TX.init(params)


FORMS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "arguments": (as_arguments, params_and_opt_state),
    "dict": (
        as_dict,
        lambda: (dict(zip(("params", "opt"), params_and_opt_state(), strict=True)) | {"step": 0},),
    ),
    "NamedTuple": (as_named_tuple, lambda: (Learner(*params_and_opt_state(), jnp.zeros(())),)),
    "batch first": (batch_first, params_and_opt_state),
    "TrainStates": (adversaries, pair),
    "class": (in_a_class, lambda: (Pair(*pair()),)),
}


def arrays(tree: Any) -> Any:
    return [host(x) for x in jax.tree.leaves(tree)]


SINGLE = jax.tree.map(lambda x: x.astype(np.float32), BATCH)


def call(form: str) -> Callable[..., Any]:
    """Calls a step on a state of this form."""
    if form == "batch first":
        return lambda step, state, arguments: step(*arguments, *state)
    return emitted.in_arguments


@pytest.mark.parametrize(("stage", "k"), [(3, 1), (0, 1), (1, 1), (2, 4), (3, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_exactly(form: str, stage: int, k: int) -> None:
    step, create = FORMS[form]
    source = emitted.Source(create, step, (SINGLE,), call(form))
    if k > 1 and form in ("TrainStates", "class"):
        with pytest.raises(
            ValueError,
            match=r"cannot be accumulated.*critic|state\[1\]\.params",
        ):
            emitted.check(source, stage, k)
        return
    emitted.check(source, stage, k, small_array_size=0)


@pytest.mark.parametrize("form", ["dict", "NamedTuple", "batch first", "class"])
def test_compiled(form: str) -> None:
    """Three steps, the first of which places the state."""
    step, create = FORMS[form]
    with jax.enable_x64(True):
        batch = jax.tree.map(jnp.asarray, BATCH)
        results = []
        for run in (zero_for(3, small_array_size=0)(step), jax.jit(step)):
            state, results_of_run = create(), []
            for _ in range(3):
                out = call(form)(run, state, (batch,))
                state = new_state(form, out, len(state))
                results_of_run.append(arrays(out))
            results.append(results_of_run)
    assert_near(*results, TOLERANCE["float64"])


def new_state(form: str, out: Any, n: int) -> tuple[Any, ...]:
    if form == "batch first":
        return tuple(out["new"])
    return (out[1],) if form == "NamedTuple" else tuple(out[:n])


@pytest.mark.parametrize("form", FORMS)
def test_a_stage_shards_what_it_says(form: str) -> None:
    create = FORMS[form][1]

    def sharded(stage: int) -> tuple[int, int]:
        made = zero_for(stage, small_array_size=0).abstract_state(create)
        leaves = jax.tree.leaves(made)
        big = [x for x in leaves if x.size > WIDTH]
        return sum(not x.sharding.is_fully_replicated for x in big), len(big)

    # A matrix has two moments.
    networks = {"TrainStates": 2, "class": 2}.get(form, 1)
    assert sharded(0)[0] == 0
    assert sharded(1) == sharded(3) == (6 * networks,) * 2


def test_a_key_that_comes_back_is_no_batch() -> None:
    """A step as EasyLM has it."""

    def step(state: TrainState, key: jax.Array, batch: Any) -> Any:
        key, noise = jax.random.split(key)
        shift = jax.random.normal(noise, (WIDTH,))

        def loss(params: Any) -> jax.Array:
            return loss_of(params, {"x": batch["x"] + shift, "y": batch["y"]})

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), key, {"loss": value}

    state, key, metrics = zero_for(3)(step)(train_state(0), jax.random.key(1), BATCH)
    plain, plain_key, plain_metrics = jax.jit(step)(train_state(0), jax.random.key(1), BATCH)
    assert isinstance(state, TrainState)
    assert key == plain_key
    got, want = (state.params, metrics), (plain.params, plain_metrics)
    assert_near(arrays(got), arrays(want), TOLERANCE["float32"])


class TestTheState:
    def test_is_planned_lowered_and_listed(self) -> None:
        zero = zero_for(3, small_array_size=0)
        step, state = zero(as_arguments), zero.abstract_state(params_and_opt_state)
        assert "state[0]['in']" in str(zero.plan(state))
        assert "all-gather" in step.lower(*state, BATCH).compile().as_text()
        rows = step.collectives(*state, BATCH).rows
        gathered = [row.array for row in rows if row.kind == "all-gather"]
        assert "state[0]['in']" in gathered
        scattered = {row.array for row in rows if row.kind == "reduce-scatter"}
        assert scattered

    def test_is_named_where_it_cannot_be_found(self) -> None:
        def step(params: Any, opt_state: Any, batch: Any, lr: Any) -> Any:
            params, opt_state, loss = updated(params, opt_state, batch)
            return params, opt_state, loss * lr

        *_, loss = zero_for(1)(step, state_argnums=(0, 1))(*params_and_opt_state(), BATCH, 2.0)
        assert loss == pytest.approx(2 * float(loss_of(network(0), BATCH)))
        with pytest.raises(TypeError, match=r"without the new state \(dict\)"):
            zero_for(1)(step, state_argnums=2)(*params_and_opt_state(), BATCH, 2.0)

    def test_that_does_not_come_back_is_refused(self) -> None:
        def step(params: Any, opt_state: Any, batch: Any) -> Any:
            params, opt_state, loss = updated(params, opt_state, batch)
            return loss

        with pytest.raises(TypeError, match=r"none of its arguments \(0 \(params\), 1 \(opt_state"):
            zero_for(1)(step)(*params_and_opt_state(), BATCH)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"bf16": True}, r"optimizer of its own.*bf16 or fp16.*zero\.wrap\(tx\)"),
        (
            {"offload_optimizer": {"device": "cpu"}},
            "which does not apply offload_optimizer",
        ),
        ({"gradient_clipping": 1.0}, r"gradient_clipping = 1.*zero\.wrap\(tx\)"),
        (
            {"bf16": True, "zero_quantized_nontrainable_weights": True},
            "zero_quantized_nontrainable_weights needs a TrainState",
        ),
    ],
)
def test_what_works_in_the_optimizer_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zero_for(2, **config)(as_arguments)(*params_and_opt_state(), BATCH)


@pytest.mark.parametrize("k", [1, 4])
def test_the_norm_of_its_gradients_is_known(k: int) -> None:
    zero, state = zero_for(3, k), params_and_opt_state()
    step = zero(updated)
    step(*state, BATCH)
    norm = optax.tree.norm(jax.grad(loss_of)(network(0), BATCH))
    assert float(zerojax.telemetry(step)["grad_norm"]) == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_is_evaluated(stage: int) -> None:
    zero = zero_for(stage, small_array_size=0)
    params, _ = zero.init(params_and_opt_state)
    got = zero.evaluate(lambda params, batch: output(params, batch["x"]))(params, BATCH)
    np.testing.assert_allclose(got, output(network(0), BATCH["x"]), rtol=1e-5, atol=1e-6)
    loss = zero.evaluate(lambda state, batch: loss_of(state[0], batch))(
        params_and_opt_state(), BATCH
    )
    assert float(loss) == pytest.approx(float(loss_of(network(0), BATCH)), rel=1e-5)


def with_target(params: Any, target: Any, opt_state: Any, batch: Any) -> Any:
    """A value network, and an older copy of it that the loss reads."""

    def loss(params: Any) -> jax.Array:
        wanted = output(target, batch["y"])
        return jnp.mean((output(params, batch["x"]) - wanted) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


class TestRoles:
    def test_a_copy_that_is_only_read_is_named(self) -> None:
        params, opt_state = params_and_opt_state()
        given = params, network(1), opt_state, BATCH
        with pytest.raises(TypeError, match=r"0 \(params\), 1 \(target\), which.*state_argnums"):
            zero_for(3)(with_target)(*given)
        options = {"state_argnums": (0, 2)}
        for k in (1, 4):
            source = emitted.Source(
                lambda: given[:3], with_target, (SINGLE,), emitted.in_arguments, options
            )
            emitted.check(source, 3, k)

    def test_a_number_is_no_state(self) -> None:
        def step(params: Any, rate: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), network(0))
        got, want = zero_for(2)(step)(low, 0.1, BATCH), jax.jit(step)(low, 0.1, BATCH)
        assert_near(arrays(got), arrays(want), 2.0**-6)

    def test_an_array_that_may_be_of_the_batch_is_named(self) -> None:
        def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
            return *updated(params, opt_state, {"x": x, "y": y}), output(params, x)

        given = *params_and_opt_state(), *BATCH.values()
        with pytest.raises(TypeError, match=r"dtypes of 2 \(x\), which may be its"):
            zero_for(2)(step)(*given)
        got = zero_for(2)(step, batch_argnums=(2, 3))(*given)
        assert_near(arrays(got), arrays(jax.jit(step)(*given)), TOLERANCE["float32"])

    def test_the_one_array_that_can_be_the_batch(self) -> None:
        """An autoencoder's result has the form of its rows."""

        def step(params: Any, opt_state: Any, x: Any, key: Any) -> Any:
            return *updated(params, opt_state, {"x": x, "y": x}), 2 * x

        given = *params_and_opt_state(), BATCH["x"], jax.random.PRNGKey(0)
        got = zero_for(3)(step)(*given)
        assert_near(arrays(got), arrays(jax.jit(step)(*given)), TOLERANCE["float32"])


class TestMemory:
    """A step takes over what zerojax has made, and nothing else."""

    def test_a_part_of_an_old_state_is_refused(self) -> None:
        zero = zero_for(3)
        step, first = zero(as_arguments), zero.init(params_and_opt_state)
        second = step(*first, BATCH)
        third = step(*second[:2], BATCH)
        with pytest.raises(ValueError, match="took over the memory of this state"):
            step(third[0], second[1], BATCH)
        step(*third[:2], BATCH)
        with pytest.raises(ValueError, match="took over the memory of this state"):
            zero.evaluate(lambda state, batch: loss_of(state[0], batch))(first, BATCH)

    def test_the_caller_s_arrays_live_on(self) -> None:
        zero = zero_for(0)
        placed = jax.device_put(params_and_opt_state(), NamedSharding(zero.mesh, PartitionSpec()))
        step = zero(as_arguments)
        *state, _ = step(*placed, BATCH)
        step(state[0], placed[1], BATCH)
        np.testing.assert_array_equal(placed[0]["in"], network(0)["in"])

    def test_a_leaf_that_was_changed(self) -> None:
        """The others are taken over as they are."""
        zero = zero_for(3)
        step, (params, opt_state) = zero(as_arguments), zero.init(params_and_opt_state)
        params["in"] = params["in"] * 2
        kept = params["out"]
        plain = dict(network(0)) | {"in": network(0)["in"] * 2}
        got, want = step(params, opt_state, BATCH), jax.jit(updated)(plain, TX.init(plain), BATCH)
        assert_near(arrays(got), arrays(want), TOLERANCE["float32"])
        assert kept.is_deleted()

    def test_what_is_the_state_and_read_besides(self) -> None:
        zero = zero_for(3)
        params, opt_state = zero.init(params_and_opt_state)
        got = zero(with_target, state_argnums=(0, 2))(params, params, opt_state, BATCH)
        mine = network(0)
        want = jax.jit(with_target)(mine, mine, TX.init(mine), BATCH)
        assert_near(arrays(got), arrays(want), TOLERANCE["float32"])


def test_two_train_states_are_not_returned_for_one() -> None:
    def step(state: TrainState, batch: Any) -> Any:
        return state, state.apply_gradients(grads=jax.grad(loss_of)(state.params, batch))

    with pytest.raises(TypeError, match="step returns two states"):
        zero_for(1)(step)(train_state(0), BATCH)
