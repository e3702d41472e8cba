"""Every optimizer and transformation of optax and ``optax.contrib`` computes plain jit's numbers.

The loop goes over the public names of both modules, so that what a new optax brings is run too: it
is built from its defaults, or a line of ``BUILT`` says how, else a test fails.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from equal import STEPS, TOLERANCE, assert_near, host, zero_for
from flax.training.train_state import TrainState

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings(
        "ignore:.*deprecated:DeprecationWarning"
    ),  # as long as they are there
]

ROWS, WIDTH, HIDDEN = 32, 8, 24
BATCH = dict(zip("xy", np.random.default_rng(0).normal(size=(2, ROWS, WIDTH)), strict=True))
RATE = 0.01


def network() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (WIDTH, HIDDEN)) / 3,
        "bias": jnp.full((HIDDEN,), 0.1),
        "out": jax.random.normal(keys[1], (HIDDEN, WIDTH)) / 5,
        "temperature": jnp.ones(()),
    }


def loss_of(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((params["temperature"] * (hidden @ params["out"]) - batch["y"]) ** 2)


def mask(tree: Any) -> Any:
    """Of the two matrices; a tree of the same form, also of shapes."""
    return jax.tree.map(lambda x: len(x.shape) == 2, tree)


def descend(tx: Any) -> Any:
    return optax.chain(tx, optax.scale(-RATE))


def every_other(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


def size(updates: Any) -> Any:
    return optax.tree.norm(updates)


def but_numbers(tx: Any) -> Any:
    """For those that cannot train a number, or make an array of it."""
    return optax.masked(tx, lambda tree: jax.tree.map(lambda x: bool(x.shape), tree))


def filled(tx: Any) -> Any:
    """With what ``tx`` measures in its state from the start: a state keeps its tree."""

    def init(params: Any) -> Any:
        after = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[1], params)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), after)

    return tx._replace(init=init)


def adam() -> Any:
    return optax.adam(RATE)


# Those with arguments that have no defaults, or whose result is no optimizer alone.
BUILT: dict[str, Callable[[], Any]] = {
    "optax.MultiSteps": lambda: optax.MultiSteps(adam(), 2).gradient_transformation(),
    "optax.adaptive_grad_clip": lambda: descend(optax.adaptive_grad_clip(0.1)),
    "optax.add_noise": lambda: descend(optax.add_noise(0.01, 0.55, jax.random.key(1))),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(adam(), 3),
    "optax.chain": lambda: optax.chain(optax.clip(0.1), adam()),
    "optax.clip": lambda: descend(optax.clip(0.01)),
    "optax.clip_by_block_rms": lambda: descend(optax.clip_by_block_rms(0.01)),
    "optax.clip_by_global_norm": lambda: descend(optax.clip_by_global_norm(0.1)),
    "optax.conditionally_mask": lambda: optax.conditionally_mask(adam(), every_other),
    "optax.conditionally_transform": lambda: descend(
        optax.conditionally_transform(optax.scale_by_adam(), every_other)
    ),
    "optax.ema": lambda: descend(optax.ema(0.9)),
    "optax.flatten": lambda: optax.flatten(adam()),
    "optax.freeze": lambda: optax.chain(adam(), optax.freeze(mask(network()))),
    "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(RATE, 0.0, 5)
    ),
    "optax.inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(
        optax.linear_schedule(RATE, 0.0, 5)
    ),
    "optax.lookahead": lambda: optax.lookahead(adam(), 2, 0.5),
    "optax.masked": lambda: optax.masked(adam(), mask),
    "optax.measure_with_ema": lambda: optax.chain(
        filled(optax.monitor({"size": optax.measure_with_ema(size, 0.9)})), adam()
    ),
    "optax.monitor": lambda: optax.chain(filled(optax.monitor({"size": size})), adam()),
    "optax.multi_transform": lambda: optax.multi_transform(
        {True: adam(), False: optax.set_to_zero()}, mask
    ),
    "optax.named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", adam())),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(1)),
    "optax.partition": lambda: optax.partition(
        {True: adam(), False: optax.sgd(RATE, momentum=0.9)}, mask
    ),
    "optax.scale": lambda: optax.scale(-RATE),
    "optax.scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)
    ),
    "optax.scale_by_distance_over_gradients": lambda: but_numbers(
        descend(optax.scale_by_distance_over_gradients())
    ),
    "optax.scale_by_schedule": lambda: optax.scale_by_schedule(
        optax.linear_schedule(-RATE, 0.0, 5)
    ),
    "optax.scale_by_sm3": lambda: but_numbers(descend(optax.scale_by_sm3())),
    "optax.scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)
    ),
    "optax.selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask=mask(network())
    ),
    "optax.sm3": lambda: but_numbers(optax.sm3(RATE)),
    "optax.snapshot": lambda: optax.chain(optax.snapshot("size", size), adam()),
    "optax.stateless": lambda: optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: -RATE * u, updates)
    ),
    "optax.stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda u, p: -RATE * (u + p)
    ),
    "optax.trace": lambda: descend(optax.trace(0.9)),
    "optax.with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
    "optax.contrib.differentially_private_aggregate": lambda: descend(
        optax.contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(1))
    ),
    "optax.contrib.dpsgd": lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, seed=1),
    "optax.contrib.mechanize": lambda: optax.contrib.mechanize(adam()),
    "optax.contrib.reduce_on_plateau": lambda: optax.chain(
        adam(), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5)
    ),
    "optax.contrib.sam": lambda: optax.contrib.sam(
        adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    ),
    "optax.contrib.scale_by_muon": lambda: optax.masked(
        descend(
            optax.contrib.scale_by_muon(
                weight_dimension_numbers=lambda params: jax.tree.map(
                    lambda _: optax.contrib.MuonDimensionNumbers(), params
                )
            )
        ),
        mask,
    ),
    "optax.contrib.schedule_free": lambda: optax.contrib.schedule_free(adam(), RATE),
    "optax.contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(
        adam()
    ),
    # Options of the above that change what they compute.
    "optax.lbfgs, backtracking": lambda: optax.lbfgs(
        linesearch=optax.scale_by_backtracking_linesearch(15, store_grad=True)
    ),
    "optax.lookahead, reset": lambda: optax.lookahead(adam(), 2, 0.5, reset_state=True),
    "optax.contrib.galore, low rank": lambda: optax.contrib.galore(RATE, rank=4, update_proj_gap=2),
    "optax.contrib.sam, opaque": lambda: optax.contrib.sam(
        adam(), optax.chain(optax.contrib.normalize(), optax.sgd(0.1)), opaque_mode=True
    ),
}

# What an update needs beside gradient, state and parameters.
LINE_SEARCH = ("value", "grad", "value_fn")
NEEDS: dict[str, tuple[str, ...]] = {
    "optax.lbfgs": LINE_SEARCH,
    "optax.lbfgs, backtracking": LINE_SEARCH,
    "optax.polyak_sgd": ("value",),
    "optax.scale_by_backtracking_linesearch": LINE_SEARCH,
    "optax.scale_by_polyak": ("value",),
    "optax.scale_by_zoom_linesearch": LINE_SEARCH,
    "optax.contrib.hutchinson_estimator_diag_hessian": ("obj_fn",),
    "optax.contrib.momo": ("value",),
    "optax.contrib.momo_adam": ("value",),
    "optax.contrib.reduce_on_plateau": ("value",),
    "optax.contrib.sam, opaque": ("grad_fn",),
    "optax.contrib.sophia": ("obj_fn",),
}
EVALUATE_THE_LOSS = {
    *(name for name, needs in NEEDS.items() if needs == LINE_SEARCH),
    "optax.contrib.sam, opaque",
    "optax.contrib.sophia",
}
"""Within the update, again, so that a step by micro-batch is refused."""
PER_EXAMPLE = {"optax.contrib.differentially_private_aggregate", "optax.contrib.dpsgd"}
"""Their gradients have a leading dimension of rows."""
FAST_AND_SLOW = {"optax.lookahead", "optax.lookahead, reset"}
"""Their parameters are ``optax.LookaheadParams``."""
# Without an annotation of what they return, and with arguments that have no defaults.
OTHER_FUNCTIONS = {
    "optax.bias_correction", "optax.init_empty_state", "optax.matrix_inverse_pth_root",
    "optax.sigmoid_binary_cross_entropy", "optax.update_infinity_moment", "optax.update_moment",
    "optax.update_moment_per_elem_norm", "optax.contrib.schedule_free_eval_params",
}  # fmt: skip


def functions() -> dict[str, Any]:
    """The public functions of both modules, but for those that say that they return no
    transformation."""
    found = {}
    for module in (optax, optax.contrib):
        for name, value in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            returned = inspect.signature(value).return_annotation
            if returned is inspect.Signature.empty or "GradientTransformation" in str(returned):
                found[f"{module.__name__}.{name}"] = value
    return {name: f for name, f in found.items() if name not in OTHER_FUNCTIONS}


NAMES = sorted({*functions(), *BUILT})


def build(name: str) -> Any:
    """A transformation, as ``BUILT`` has it or from its defaults."""
    if name in BUILT:
        return BUILT[name]()
    make = functions()[name]
    try:
        if "learning_rate" in inspect.signature(make).parameters:
            return make(learning_rate=RATE)
        tx = make()
    except TypeError as error:
        raise AssertionError(
            f"{name} cannot be built from its defaults ({error}): add a line to BUILT in this "
            "file, or to OTHER_FUNCTIONS where it makes no transformation"
        ) from None
    return descend(tx) if name.partition("scale_by_")[1] else tx


def test_each_is_known() -> None:
    for name in NAMES:
        tx = build(name)
        assert isinstance(tx, optax.GradientTransformation), (
            f"{name} makes a {type(tx).__name__}: add it to OTHER_FUNCTIONS"
        )
    unknown = {*NEEDS, *PER_EXAMPLE, *FAST_AND_SLOW} - {*NAMES}
    assert not unknown


def parameters(name: str) -> Any:
    return optax.LookaheadParams.init_synced(network()) if name in FAST_AND_SLOW else network()


def gradients(name: str, params: Any, batch: Any) -> tuple[Any, Any, dict[str, Any]]:
    """The loss, its gradients, and what else the update needs."""
    trained = params.fast if name in FAST_AND_SLOW else params

    def loss(params: Any, *_: Any) -> jax.Array:
        return loss_of(params, batch)

    value, grads = jax.value_and_grad(loss)(trained)
    known = {
        "value": value,
        "grad": grads,
        "value_fn": loss,
        "obj_fn": loss,
        "grad_fn": jax.grad(loss),
    }
    if name in PER_EXAMPLE:
        grads = jax.vmap(jax.grad(loss_of), (None, 0))(trained, batch)
    return value, grads, {key: known[key] for key in NEEDS.get(name, ())}


def as_arguments(name: str, tx: Any, params: Any, opt_state: Any, batch: Any) -> Any:
    value, grads, extra = gradients(name, params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state, value


def on_train_state(name: str, state: TrainState, batch: Any) -> Any:
    value, grads, extra = gradients(name, state.params, batch)
    if not extra:
        return state.apply_gradients(grads=grads), value
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params, **extra)
    params = optax.apply_updates(state.params, updates)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), value


def steps_of_arguments(name: str, run: Callable[..., Any]) -> Any:
    tx, params = build(name), parameters(name)
    step = run(functools.partial(as_arguments, name, tx))
    state, values = (params, tx.init(params)), []
    for _ in range(STEPS):
        *state, value = step(*state, BATCH)
        values.append(value)
    return host((values, state[0]))


def steps_of_train_state(name: str, run: Callable[..., Any]) -> Any:
    state = TrainState.create(apply_fn=None, params=parameters(name), tx=build(name))
    step, values = run(functools.partial(on_train_state, name)), []
    for _ in range(STEPS):
        state, value = step(state, BATCH)
        values.append(value)
    return host((values, state.params))


@functools.cache
def plain(name: str) -> Any:
    return steps_of_arguments(name, jax.jit)


def cells() -> Iterator[Any]:
    """Each at stage 3 and at one of the others in turn, at stage 2 by micro-batch; all but a few in
    the sweep."""
    fast = {
        ("optax.scale_by_backtracking_linesearch", 3),
        ("optax.contrib.dog", 1),
        ("optax.contrib.sam", 2),
    }
    for i, name in enumerate(NAMES):
        for stage in sorted({3, i % 3} | {stage for known, stage in fast if known == name}):
            marks = () if (name, stage) in fast else pytest.mark.sweep
            yield pytest.param(name, stage, marks=marks)


@pytest.mark.parametrize(("name", "stage"), list(cells()))
def test_the_numbers_of_plain_jit(name: str, stage: int, in_float64: None) -> None:
    """Of three steps, the state as two arguments and as a ``TrainState``."""
    for steps in (steps_of_arguments, steps_of_train_state):
        k = 4 if stage == 2 else 1
        if k > 1 and name in EVALUATE_THE_LOSS:
            with pytest.raises(ValueError, match="cannot be accumulated over 4 micro-batches"):
                steps(name, zero_for(stage, k, small_array_size=0))
            k = 1
        got = steps(name, zero_for(stage, k, small_array_size=0))
        assert_near(got, plain(name), TOLERANCE["float64"])


def test_what_the_first_update_adds_to_its_state() -> None:
    """``optax.monitor`` has no measurements before. Such a state is neither a batch, nor one that a
    ``TrainState`` can keep."""
    tx, params = optax.chain(optax.monitor({"size": size}), adam()), network()
    step = functools.partial(as_arguments, "optax.adam", tx)
    given = params, tx.init(params), BATCH
    got, want = zero_for(3, 4)(step)(*given), jax.jit(step)(*given)
    assert_near(host(got), host(want), TOLERANCE["float32"])
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    with pytest.raises(TypeError, match=r"measurements\['size'\] added.*Create it with what"):
        zero_for(3)(functools.partial(on_train_state, "optax.adam"))(state, BATCH)


def test_a_number_that_becomes_an_array_is_named() -> None:
    """Its shape would be another after each step; plain jit compiles anew."""
    tx = descend(optax.scale_by_distance_over_gradients())
    state = TrainState.create(apply_fn=None, params=network(), tx=tx)
    step = functools.partial(on_train_state, "optax.sgd")
    with pytest.raises(TypeError, match=r"shape of \['params'\]\['temperature'\] from \(\) to"):
        zero_for(3)(step)(state, BATCH)
