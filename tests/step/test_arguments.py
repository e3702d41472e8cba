"""How a step may be called: what is its state, its batch, a constant, or more. Each step computes
what it computes under plain jit, or is refused in words."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax.training.train_state import TrainState

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")

ROWS = 16
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(ROWS, 8)).astype(np.float32), RNG.normal(size=(ROWS, 4)).astype(np.float32)


def make_state() -> TrainState:
    params = {"w": jnp.linspace(-1, 1, 32).reshape(8, 4), "b": jnp.zeros(4)}
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def update(state: TrainState, x: Any, y: Any, scale: Any = 1.0) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: Any) -> jax.Array:
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2) * scale

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    return update(state, *batch)


def same(found: Any, plain: Any) -> None:
    """Equal to rounding, in structure too."""
    found, plain = (jax.tree.map(lambda x: x, t) for t in (found, plain))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def agrees(
    step: Callable[..., Any], *args: Any, jit: Callable[..., Any] = jax.jit, zero: Any = None
) -> None:
    """Three steps of plain jit and of zero make the same state."""
    zero = zero or zero_for(3)
    plain, mine = jit(step), zero(step)
    a, b = make_state(), make_state()
    for _ in range(3):
        a, out = plain(a, *args)
        b, mine_out = mine(b, *args)
        same((b.params, mine_out), (a.params, out))


def scaled_step(state: TrainState, batch: Any, how: str, times: int = 1) -> Any:
    assert isinstance(times, int)
    return update(state, *batch, scale=times * (2.0 if how == "double" else 1.0))


class TestJit:
    def test_static_arguments_of_it_stay_static(self) -> None:
        step = zerojax.zero(stage=2)(jax.jit(scaled_step, static_argnums=(2, 3)))
        state, loss = step(make_state(), (X, Y), "double", 3)
        same(loss, update(make_state(), X, Y, 6.0)[1])
        _, loss = step(state, (X, Y), "double", times=2)
        same(loss, update(update(make_state(), X, Y, 6.0)[0], X, Y, 4.0)[1])

    def test_donating_the_batch(self) -> None:
        step = zerojax.zero(stage=1)(jax.jit(train_step, donate_argnames=("state", "batch")))
        with pytest.raises(ValueError, match=r"donates 1 \(batch\).*Remove donate_argnums"):
            step(make_state(), (X, Y))

    @pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
    def test_with_shardings(self, option: str) -> None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with pytest.raises(ValueError, match=f"train_step is jitted with {option}.*Remove it"):
            zerojax.zero(stage=1)(jax.jit(train_step, **{option: sharding}))


class Config:
    """Of a kind that has a dtype, and is no array."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.shape = dtype, ()


def test_a_batch_before_the_state() -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        zerojax.zero(stage=1)(train_step)((X, Y), make_state())
    assert "defined as train_step(state, batch), swap the arguments" in caught.value.__notes__[0]


class Tensor:
    """A tensor of another library: its dtype is not one of NumPy's."""

    shape, dtype = (8, 4), "torch.float32"

    def numpy(self) -> np.ndarray:
        return np.ones(self.shape, np.float32)


def test_the_error_about_a_tensor_of_another_library_says_how_to_convert_it() -> None:
    zero = zerojax.zero(stage=1)
    state = zero.init(lambda: {"w": jnp.ones(4)})
    message = r"the batch\['x'\] is a [\w.]*Tensor: pass its NumPy array, x.numpy\(\)"
    with pytest.raises(TypeError, match=message):
        zero(lambda state, batch: state)(state, {"x": Tensor()})


def test_an_error_about_floating_labels_says_what_to_pass() -> None:
    zero = zerojax.zero(stage=1)

    @zero
    def train_step(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            logits = batch["x"] @ params["w"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss_fn)(params))

    params = zero.init(lambda: {"w": jnp.ones((4, 3))})
    batch = {"x": np.ones((8, 4), np.float32), "y": np.zeros(8, np.float32)}
    with pytest.raises(TypeError, match="integer") as caught:
        train_step(params, batch)
    assert "if these are labels, pass labels.astype(np.int32)" in caught.value.__notes__[0]


def test_a_number_in_place_of_a_key_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        zerojax.zero(stage=1).init(lambda key: {"w": jax.random.normal(key, (8,))}, 0)
    assert "pass jax.random.key(0)." in caught.value.__notes__[0]


def test_keywords_without_a_stage_are_noticed(caplog: pytest.LogCaptureFixture) -> None:
    zerojax.zero(bf16=True)
    (record,) = caplog.records
    assert (
        "at stage 0 nothing is sharded: write zerojax.zero(stage=3, bf16=True)"
        in record.getMessage()
    )
    caplog.clear()
    zerojax.zero(stage=0, bf16=True)
    zerojax.zero({"bf16": {"enabled": True}})  # as DeepSpeed, whose default is stage 0
    assert caplog.records == []


class TestStatic:
    def test_arguments_by_position_and_name(self) -> None:
        zero = zerojax.zero(stage=1)
        for step, args, kwargs in (
            (zero(scaled_step, static_argnums=(2, 3)), ("", 5), {}),
            (zero(scaled_step, static_argnums=(-1, 2)), ("",), {"times": 5}),
            (zero(scaled_step, static_argnames="times"), (), {"how": "", "times": 5}),
        ):
            same(step(make_state(), (X, Y), *args, **kwargs)[1], update(make_state(), X, Y, 5.0)[1])

    def test_position_that_is_not_there(self) -> None:
        with pytest.raises(ValueError, match=r"static_argnums has 4, but train_step takes state"):
            zerojax.zero(stage=1)(train_step, static_argnums=4)

    def test_argument_of_another_type(self) -> None:
        with pytest.raises(TypeError, match=r"static_argnums: expected positions or names"):
            zerojax.zero(stage=1)(train_step, static_argnums=1.5)

    def test_argument_that_is_not_hashable(self) -> None:
        step = zerojax.zero(stage=1)(scaled_step, static_argnums=2)
        with pytest.raises(TypeError, match=r"static argument 2 \(how\) is a list.*not hashable"):
            step(make_state(), (X, Y), [1])

    @pytest.mark.parametrize(
        "what", [jnp.float32, np.float32, jnp.dtype("float32"), Config(jnp.float32), None, len]
    )
    def test_types_and_configs_are_never_traced(self, what: Any) -> None:
        def step(state: TrainState, batch: Any, it: Any) -> Any:
            assert it is what
            return train_step(state, batch)

        agrees(step, (X, Y), what, jit=lambda f: lambda *args: f(*args))

    def test_a_config_that_is_not_hashable(self) -> None:
        @dataclass
        class Mine:
            dtype: Any = jnp.float32

        step = zerojax.zero(stage=1)(lambda state, batch, config: train_step(state, batch))
        with pytest.raises(TypeError, match=r"2 \(config\) is a Mine, .*not hashable"):
            step(make_state(), (X, Y), Mine())


class TestBatchArguments:
    @pytest.mark.parametrize("keywords", [False, True])
    def test_are_cut_together(self, keywords: bool) -> None:
        step = zerojax.zero(stage=2, gradient_accumulation_steps=2)(update, batch_argnums=(1, 2))
        given = ((), {"y": Y, "x": X}) if keywords else ((X, Y), {})
        state, loss = step(make_state(), *given[0], **given[1])
        same((state.params, loss), (lambda s, x: (s.params, x))(*update(make_state(), X, Y)))

    def test_of_keywords_alone(self) -> None:
        def step(state: TrainState, *, x: Any, y: Any, scale: Any = 1.0) -> Any:
            return update(state, x, y, scale)

        zero = zerojax.zero(stage=2, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match=r"argument y has .*batch_argnames=\('x', 'y'\)"):
            zero(step)(make_state(), x=X, y=Y)
        for names in (["x", "y"], ("x", "y")):
            state, loss = zero(step, batch_argnames=names)(make_state(), x=X, y=Y)
            same((state.params, loss), (lambda s, x: (s.params, x))(*update(make_state(), X, Y)))
        with pytest.raises(ValueError, match="batch_argnames has 'z', but step takes state, x"):
            zero(step, batch_argnames="z")

    def test_by_position_and_by_name(self) -> None:
        zero = zerojax.zero(stage=2, gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match=r"zero\(step, batch_argnums=\(1, 2\)\)"):
            zero(update)(make_state(), X, y=Y)
        both = {"batch_argnums": (1,), "batch_argnames": ("y",)}
        for options in (both, {"batch_argnames": ("x", "y")}):
            for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"x": X, "y": Y})):
                state, _ = zero(update, **options)(make_state(), *args, **kwargs)
                same(state.params, update(make_state(), X, Y)[0].params)

    def test_name_one_that_is_not_the_first(self) -> None:
        def step(state: TrainState, key: jax.Array, batch: Any) -> Any:
            return train_step(state, batch)

        zero = zerojax.zero(stage=1)
        for run in (zero(step), zero(step, batch_argnums=2)):  # a key is no batch
            same(run(make_state(), jax.random.key(0), (X, Y))[1], update(make_state(), X, Y)[1])

    def test_are_no_parameters(self) -> None:
        """Parameters of their own, before the rows, of which one has as many as the batch."""

        def step(state: TrainState, before: Any, batch: Any) -> tuple[TrainState, jax.Array]:
            (x, y), target = batch, batch[0] @ before["w"] + before["b"]
            return update(state, x, 0.5 * (y + target))

        rows = {"gradient_accumulation_steps": 2, "stage": 3, "mesh": zerojax.mesh(devices=4)}
        batch = X[:8], Y[:8]  # eight rows, as ``w`` has
        agrees(step, make_state().params, batch, zero=zerojax.zero(**rows))

    def test_that_are_static_too(self) -> None:
        with pytest.raises(ValueError, match="batch_argnums and static_argnums both name"):
            zerojax.zero(stage=1)(update, batch_argnums=(1, 2), static_argnums=1)

    def test_that_are_missing_from_the_call(self) -> None:
        step = zerojax.zero(stage=1)(update, batch_argnums=(1, 3))
        with pytest.raises(TypeError, match=r"batch_argnums names 3 \(scale\), which"):
            step(make_state(), X, Y)

    def test_are_not_needed_without(self) -> None:
        agrees(update, X, Y)


class Trainer:
    """A program that keeps its step in a class."""

    zero = zerojax.zero(stage=1)

    def __init__(self, scale: float) -> None:
        self.scale, self.traced = scale, 0

    @zero
    def step(self, state: TrainState, batch: Any) -> Any:
        self.traced += 1
        return update(state, *batch, scale=self.scale)

    @functools.partial(zero, batch_argnums=(2, 3))
    def two(self, state: TrainState, x: Any, y: Any) -> Any:
        return update(state, x, y, scale=self.scale)


class TestMethod:
    def test_is_a_step_of_its_instance(self) -> None:
        for scale in (1.0, 3.0):
            trainer = Trainer(scale)
            state, _ = trainer.step(make_state(), (X, Y))
            traced = trainer.traced
            state, loss = trainer.step(state, (X, Y))
            assert trainer.traced == traced
            assert int(state.step) == 2
            plain, _ = update(make_state(), X, Y, scale)
            same(loss, update(plain, X, Y, scale)[1])

    def test_with_positions_that_count_self(self) -> None:
        loss = Trainer(2.0).two(make_state(), X, Y)[1]
        same(loss, update(make_state(), X, Y, 2.0)[1])

    def test_of_instances_with_slots(self) -> None:
        class Slotted:
            __slots__ = ()
            step = zerojax.zero(stage=1)(lambda self, state, batch: train_step(state, batch))

        with pytest.raises(TypeError, match=r"step is a step of Slotted.*__slots__.*bound method"):
            Slotted().step(make_state(), (X, Y))


class TestRefused:
    @pytest.mark.parametrize(
        "call",
        [
            lambda step, state: jax.jit(step)(state, (X, Y)),
            lambda step, state: jax.jit(lambda: step(state, (X, Y)))(),
            lambda step, state: jax.lax.scan(lambda s, _: step(s, (X, Y)), state, length=2),
        ],
    )
    def test_within_another_program(self, call: Any) -> None:
        step, state = zerojax.zero(stage=1, donate=False)(train_step), make_state()
        step(state, (X, Y))
        with pytest.raises(
            TypeError, match=r"train_step is decorated.*inside jax\.jit, scan.*loop"
        ):
            call(step, state)
        step(state, (X, Y))

    def test_two_states(self) -> None:
        step = zerojax.zero(stage=1)(lambda first, second, batch: train_step(first, batch))
        with pytest.raises(TypeError, match=r"got a TrainState as the batch \(1 \(second\)\)"):
            step(make_state(), make_state(), (X, Y))


class TestWithoutABatch:
    """All numbers of the step are closed over, drawn from a key, or in the state."""

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_a_train_state_and_a_key(self, stage: int) -> None:
        def step(state: TrainState, key: jax.Array) -> Any:
            return update(state, X + jax.random.normal(key, X.shape), Y)

        agrees(step, jax.random.key(0), zero=zero_for(stage))
        agrees(lambda state: update(state, X, Y), zero=zero_for(stage))

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_one_state_of_everything(self, stage: int) -> None:
        def step(runner: Any) -> Any:
            state, x, key = runner
            key, drawn = jax.random.split(key)
            state, loss = update(state, x + jax.random.normal(drawn, x.shape), Y)
            return (state, x * 0.9, key), {"loss": loss}

        runs = []
        for run in (jax.jit, zero_for(stage)):
            run, runner, losses = run(step), (make_state(), jnp.asarray(X), jax.random.key(0)), []
            for _ in range(3):
                runner, metrics = run(runner)
                losses.append(metrics["loss"])
            runs.append((runner[0].params, runner[1], losses))
        same(runs[1], runs[0])
        assert not stage or "data" in runner[1].sharding.spec

    def test_is_said_once(self, caplog: pytest.LogCaptureFixture) -> None:
        step, state = zero_for(3)(lambda state: update(state, X, Y)), make_state()
        for _ in range(2):
            state, _ = step(state)
        assert sum("takes no batch" in record.getMessage() for record in caplog.records) == 1

    @pytest.mark.parametrize("key", ["train_batch_size", "gradient_accumulation_steps"])
    def test_is_refused_where_the_config_divides_one(self, key: str) -> None:
        step = zerojax.zero(stage=1, **{key: 16})(lambda state, key: update(state, X, Y))
        with pytest.raises(ValueError, match=f"takes no batch.*{key}"):
            step(make_state(), jax.random.key(0))

    def test_leaves_that_change_their_dtype_are_named(self) -> None:
        def step(state: Any) -> Any:
            return {"w": state["w"] * 0.9, "count": state["count"] + 1.0}

        state = {"w": jnp.ones((8, 4)), "count": jnp.zeros((), jnp.int32)}
        match = r"\['count'\] comes back as float32, and was int32"
        with pytest.raises(TypeError, match=match):
            zero_for(1)(step)(state)
