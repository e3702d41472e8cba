"""NNX steps with more than a model and its optimizer: all of them are updated in place, as under
``nnx.jit``, or refused in words."""

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import emitted
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(0)
BATCH = {
    "image": RNG.normal(size=(16, 8)).astype(np.float32),
    "label": RNG.integers(4, size=16),
}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)
        self.second = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
        x = nnx.relu(self.first(x))
        return self.second(self.dropout(x, rngs=rngs, deterministic=rngs is None))


def create() -> tuple[Any, ...]:
    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), metrics, nnx.Rngs(1)


def train(model: Any, optimizer: Any, batch: Any, metrics: Any = None, rngs: Any = None) -> Any:
    def loss_fn(model: Any, rngs: Any) -> Any:
        logits = model(batch["image"], rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs)
    if metrics is not None:
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def full_step(model: Any, optimizer: Any, metrics: Any, rngs: Any, batch: Any) -> Any:
    return train(model, optimizer, batch, metrics, rngs)


def same(found: Any, plain: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True)
    for a, b in pairs:
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def values(objects: tuple[Any, ...]) -> list[Any]:
    """The arrays of all objects but the optimizer, whose state has another form under zero."""
    return jax.tree.leaves([nnx.state((x,)) for x in objects if not isinstance(x, nnx.Optimizer)])


def agrees(
    step: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    *more: Any,
    born: bool = False,
) -> None:
    """Three steps under nnx.jit and under zero leave the same numbers in every object."""
    zero = zero_for(3)
    plain, mine = make(), zero.init(make) if born else make()
    jitted, decorated = nnx.jit(step), zero(step)
    for _ in range(3):
        same(decorated(*mine, *more), jitted(*plain, *more))
        same(values(mine), values(plain))


@pytest.mark.parametrize("born", [True, False])
def test_metrics_and_rngs_are_updated_in_place(born: bool) -> None:
    agrees(full_step, create, BATCH, born=born)


def test_another_model_of_the_same_form_is_left_alone() -> None:
    """A mean teacher: the model is the one that comes first."""

    def step(student: Any, teacher: Any, optimizer: Any, batch: Any) -> Any:
        loss = train(student, optimizer, batch)
        old, new = nnx.state(teacher, nnx.Param), nnx.state(student, nnx.Param)
        nnx.update(teacher, jax.tree.map(lambda t, s: 0.9 * t + 0.1 * s, old, new))
        return loss

    def make() -> tuple[Any, ...]:
        model, optimizer, *_ = create()
        return model, Net(nnx.Rngs(5)), optimizer

    agrees(step, make, BATCH, born=True)
    emitted.check(emitted.Source(make, step, (BATCH,), emitted.in_arguments, rows=16), 1, 2)


def test_an_update_of_the_second_of_two_alike() -> None:
    def step(frozen: Any, model: Any, optimizer: Any, batch: Any) -> Any:
        return train(model, optimizer, batch)

    model, optimizer, *_ = create()
    with pytest.raises(ValueError, match="does not train the first model"):
        zerojax.zero(stage=1)(step)(Net(nnx.Rngs(5)), model, optimizer, BATCH)


def test_accumulation() -> None:
    """Counts of the metrics, and a stream that every micro-batch draws from."""
    zero = zerojax.zero(stage=2, gradient_accumulation_steps=2)
    objects = zero.init(create)
    loss = zero(full_step)(*objects, BATCH)
    found = objects[2].compute()
    assert int(objects[2].accuracy.count[...]) == 16
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    assert int(objects[3].default.count[...]) == 2
    assert int(zerojax.telemetry(objects)["step"]) == 1


@pytest.mark.slow
def test_checkpoints(tmp_path: Path) -> None:
    """On disk the model comes first, then its optimizer, in whatever order they are passed."""

    def make() -> tuple[Any, ...]:
        return create()[::-1]

    def step(*arguments: Any) -> Any:
        *objects, batch = arguments
        return full_step(*objects[::-1], batch)

    zero = zero_for(3)
    objects = zero.init(make)
    decorated = zero(step)
    decorated(*objects, BATCH)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, objects)
        checkpointer.wait()
        other = zerojax.zero(stage=1)
        again = checkpointer.restore(other.abstract_state(make))
    same([nnx.state(x) for x in again], [nnx.state(x) for x in objects])
    same(other(step)(*again, BATCH), decorated(*objects, BATCH))
    names = {path.split(".")[0] for path in (tmp_path / "1" / "zerojax.json").read_text().split('"')
             if path.startswith(("0.", "1.", "2.", "3."))}  # fmt: skip
    assert names == {"0", "1", "2", "3"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_object_that_is_returned_is_the_callers_own(accumulation: int) -> None:
    def step(model: Any, optimizer: Any, metrics: Any, batch: Any) -> Any:
        loss = train(model, optimizer, batch, metrics)
        return {"loss": loss, "metrics": metrics}

    zero = zerojax.zero(stage=1, gradient_accumulation_steps=accumulation)
    model, optimizer, metrics, _ = create()
    out = zero(step)(model, optimizer, metrics, BATCH)
    assert out["metrics"] is metrics
    assert int(metrics.accuracy.count[...]) == 16


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_the_step_sets_stays_set(accumulation: int) -> None:
    """``model.train()`` in the step, as under nnx.jit."""

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        model.train()
        return train(model, optimizer, batch)

    model, optimizer, *_ = create()
    model.eval()
    zero = zerojax.zero(stage=1, gradient_accumulation_steps=accumulation)
    decorated = zero(step)
    for _ in range(2):
        decorated(model, optimizer, BATCH)
        assert model.dropout.deterministic is False
    model.eval()
    decorated(model, optimizer, BATCH)
    assert model.dropout.deterministic is False


def test_cached_partial() -> None:
    zero = zerojax.zero(stage=1)
    objects, plain = zero.init(create), create()
    cached = nnx.cached_partial(zero(full_step), *objects)
    jitted = nnx.cached_partial(nnx.jit(full_step), *plain)
    for _ in range(3):
        same(cached(BATCH), jitted(BATCH))
    same(values(objects), values(plain))
    assert int(objects[1].step[...]) == 3


def test_cached_partial_of_what_zero_has_not_made() -> None:
    """The optimizer would be replaced, which nnx.cached_partial holds a copy of."""
    model, optimizer, *_ = create()
    cached = nnx.cached_partial(zerojax.zero(stage=1)(train), model, optimizer)
    with pytest.raises(ValueError, match=r"nnx\.cached_partial.*Create both with .*zero\.init"):
        cached(BATCH)


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        (lambda m, o: (o,), "none of the arguments has variables"),
        (lambda m, o: (nnx.Rngs(0), o), "none of Rngs has variables for the optimizer"),
    ],
)
def test_what_is_no_model_with_its_optimizer(objects: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        zerojax.zero(stage=1)(lambda *args: None)(*objects(*create()[:2]), BATCH)


def test_a_train_state_with_nnx_objects_beside() -> None:
    state = TrainState.create(apply_fn=None, params={"w": jnp.ones(8)}, tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match="got a TrainState as the batch"):
        zerojax.zero(stage=1)(lambda state, metrics, batch: None)(state, create()[2], BATCH)


def test_under_nnx_jit() -> None:
    """The jit is taken off, with its static arguments."""

    @zerojax.zero(stage=1)
    @nnx.jit(static_argnames="times")
    def step(model: Any, optimizer: Any, batch: Any, times: int) -> Any:
        assert isinstance(times, int)
        return train(model, optimizer, batch) * times

    model, optimizer, *_ = create()
    plain = create()
    same(step(model, optimizer, BATCH, times=2), 2 * nnx.jit(train)(plain[0], plain[1], BATCH))


def test_objects_that_are_dropped_are_freed() -> None:
    """The step lives on, and keeps neither them nor their arrays."""
    zero = zerojax.zero(stage=1)
    decorated, objects = zero(full_step), zero.init(create)
    for _ in range(3):
        decorated(*objects, BATCH)
    held = [weakref.ref(x) for x in (*objects, *jax.tree.leaves(nnx.state(objects[0], nnx.Param)))]
    del objects
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_what_a_module_holds_beside_its_arrays_needs_no_hash() -> None:
    """As under ``nnx.jit``; another value, and the step is traced anew."""

    @dataclasses.dataclass
    class Config:
        scale: float

    class Scaled(Net):
        def __init__(self, config: Config) -> None:
            super().__init__(nnx.Rngs(0))
            self.config = config

        def __call__(self, x: jax.Array, rngs: Any = None) -> jax.Array:
            traced.append(self.config.scale)
            return self.config.scale * super().__call__(x, rngs)

    def made(scale: float) -> tuple[Any, ...]:
        model = Scaled(Config(scale))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    traced: list[float] = []
    zero = zerojax.zero(stage=3)
    step, plain = zero(train), nnx.jit(train)
    for scale in (1.0, 2.0):
        objects = made(scale)
        want = [plain(*objects, BATCH) for _ in range(3)]
        traced.clear()
        objects = zero.init(functools.partial(made, scale))
        first = step(*objects, BATCH)
        assert set(traced) == {scale}
        traced.clear()
        np.testing.assert_allclose(
            [first, *(step(*objects, BATCH) for _ in range(2))], want, rtol=1e-5
        )
        assert not traced


def make_gan() -> tuple[Any, ...]:
    pair = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    return *pair, *(nnx.Optimizer(x, optax.adam(1e-2), wrt=nnx.Param) for x in pair)


def gan_step(generator: Any, critic: Any, optimizer: Any, other: Any, batch: Any) -> Any:
    def loss_of(pair: Any) -> jax.Array:
        return jnp.mean(pair[1](jnp.tile(pair[0](batch["image"]), 2)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)((generator, critic))
    optimizer.update(generator, grads[0])
    other.update(critic, jax.tree.map(jnp.negative, grads[1]))
    return loss


class Trainer(nnx.Module):
    """A trainer that holds its model, optimizer and stream."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.metrics, self.rngs = create()


def trainer_step(trainer: Any, batch: Any) -> Any:
    return train(trainer.model, trainer.optimizer, batch, trainer.metrics, trainer.rngs)


class Momentum(nnx.Module):
    """An optimizer of one's own."""

    def __init__(self, model: Any) -> None:
        self.tx = optax.sgd(0.1, momentum=0.9)
        state = self.tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))
        self.state = nnx.data(jax.tree.map(nnx.OptState, state))

    def update(self, model: Any, grads: Any) -> None:
        params = nnx.state(model, nnx.Param)
        given = nnx.as_pure(grads), nnx.as_pure(self.state), nnx.as_pure(params)
        updates, state = self.tx.update(*given)
        nnx.update(model, optax.apply_updates(nnx.as_pure(params), updates))
        variables = jax.tree.leaves(self.state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        for variable, x in zip(variables, jax.tree.leaves(state), strict=True):
            variable.set_value(x)


def own_step(optimizer: Any, model: Any, batch: Any) -> Any:
    return train(model, optimizer, batch)


def make_own() -> tuple[Any, ...]:
    model = create()[0]
    return Momentum(model), model


class Averaging(nnx.Optimizer[Any]):
    """An optimizer that averages the model that it trains."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, optax.adam(1e-2), wrt=nnx.Param)
        self.average = nnx.data(nnx.clone(model))

    def update(self, model: Any, grads: Any) -> None:  # type: ignore[override]
        super().update(model, grads)
        old, new = nnx.state(self.average, nnx.Param), nnx.state(model, nnx.Param)
        nnx.update(self.average, jax.tree.map(lambda a, x: 0.9 * a + 0.1 * x, old, new))


def make_averaging() -> tuple[Any, ...]:
    model = create()[0]
    return Averaging(model), model


STEPS = {
    "two optimizers": (make_gan, gan_step),
    "a trainer": (lambda: (Trainer(),), trainer_step),
    "an optimizer of one's own": (make_own, own_step),
    "a subclass of Optimizer": (make_averaging, own_step),
    "a model with its optimizer": (
        lambda: (nnx.ModelAndOptimizer(create()[0], optax.adam(1e-2)),),
        lambda both, batch: train(both.model, Both(both), batch),
    ),
}


@dataclasses.dataclass
class Both:
    """The update of ``nnx.ModelAndOptimizer``, which has its model."""

    both: Any

    def update(self, model: Any, grads: Any) -> None:
        self.both.update(grads)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage == 3 or not i else pytest.mark.sweep)
        for i, name in enumerate(STEPS)
        for stage in range(4)
    ],
)
def test_objects_with_their_optimizers_anywhere(name: str, stage: int) -> None:
    make, step = STEPS[name]
    zero = zero_for(stage)
    plain, mine = make(), zero.init(make) if stage % 2 else make()
    mine = mine if isinstance(mine, tuple) else (mine,)
    jitted, decorated = nnx.jit(step), zero(step)
    for _ in range(3):
        same(decorated(*mine, BATCH), jitted(*plain, BATCH))
        same(nnx.state(mine), nnx.state(plain))
    arrays = [x for x in jax.tree.leaves(nnx.state(mine)) if x.shape == (8, 16)]
    assert len(arrays) > 1
    assert {"data" in x.sharding.spec for x in arrays} == {stage > 0}


def test_two_optimizers_in_half_precision_are_refused() -> None:
    with pytest.raises(ValueError, match=r"bf16.*one model with one nnx.Optimizer"):
        zerojax.zero(stage=1, bf16=True)(gan_step)(*make_gan(), BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two optimizers", "a trainer"])
def test_checkpoints_of_objects_with_their_optimizers(name: str, tmp_path: Path) -> None:
    make, step = STEPS[name]
    zero, other = zero_for(3), zerojax.zero(stage=1)
    state = zero.init(make)
    objects = state if isinstance(state, tuple) else (state,)
    decorated = zero(step)
    decorated(*objects, BATCH)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        again = checkpointer.restore(other.abstract_state(make))
    again = again if isinstance(again, tuple) else (again,)
    same(nnx.state(again), nnx.state(objects))
    same(other(step)(*again, BATCH), decorated(*objects, BATCH))
