"""Named optimizers against DeepSpeed's formulas in NumPy, and against torch's where it is."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.formulas import adagrad, adam, lamb, lion, sgd

from zerojax.config import ConfigError, OptimizerConfig, SchedulerConfig
from zerojax.optim.named import named_optimizer
from zerojax.optim.schedules import momentum_schedule, schedule

STEPS = 10
CYCLE = SchedulerConfig(
    type="OneCycle",
    params={
        "cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3,
        "cycle_second_step_size": 4, "decay_step_size": 2, "decay_mom_rate": -0.1,
    },
)  # fmt: skip


def run(config, params, grads, scheduler=None, **mask):
    tx, _ = named_optimizer(config, scheduler, **mask)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return jax.tree.map(np.asarray, params)


def numbers_of(dtype):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(4, 3)), dtype) for _ in range(1 + STEPS)]
    return arrays[0], arrays[1:]


@pytest.fixture(scope="module")
def problem():
    return numbers_of(jnp.float32)


def check(kind, params, model, numbers, scheduler=None):
    """In float64, which leaves the formulas no room, and in float32."""
    config = OptimizerConfig(type=kind, params=params)
    with jax.enable_x64(True):
        p, grads = numbers_of(jnp.float64)
        want = model(p, grads, **numbers)
        got = run(config, p, grads, scheduler)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got - p, want - p, rtol=1e-9, atol=1e-12)
    p, grads = numbers_of(jnp.float32)
    got, want = run(config, p, grads, scheduler), model(p, grads, **numbers)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-5 * np.abs(want - p).max() + 3e-7)


CASES = [
    ("Adam", {}, adam, {}),
    ("Adam", {"weight_decay": 0.1}, adam, {"wd": 0.1}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, adam, {"wd": 0.1, "l2": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, adam, {"lr": 0.01, "wd": 0.1}),
    ("FusedAdam", {"betas": [0.8, 0.9], "eps": 0.1}, adam, {"b1": 0.8, "b2": 0.9, "eps": 0.1}),
    ("CPUAdam", {"bias_correction": False}, adam, {"correct": False}),
    ("CPUAdam", {"bias_correction": False, "adam_w_mode": False, "weight_decay": 0.1},
     adam, {"correct": False, "l2": True, "wd": 0.1}),
    ("Lion", {"weight_decay": 0.1, "lr": 0.01}, lion, {"wd": 0.1, "lr": 0.01}),
    ("Lion", {"betas": [0.5, 0.7]}, lion, {"b1": 0.5, "b2": 0.7}),
    ("SGD", {}, sgd, {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, sgd, {"mu": 0.9, "wd": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, sgd, {"mu": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1, "lr": 0.1},
     sgd, {"mu": 0.5, "nesterov": True, "wd": 0.1, "lr": 0.1}),
    ("Adagrad", {}, adagrad, {}),
    ("Adagrad", {"weight_decay": 0.1, "eps": 0.1}, adagrad, {"wd": 0.1, "eps": 0.1}),
    ("Lamb", {}, lamb, {}),
    ("Lamb", {"weight_decay": 0.1, "lr": 0.01}, lamb, {"wd": 0.1, "lr": 0.01}),
    ("Lamb", {"bias_correction": False, "max_coeff": 0.3}, lamb, {"correct": False, "high": 0.3}),
    ("Lamb", {"min_coeff": 5.0, "max_coeff": 9.0}, lamb, {"low": 5.0, "high": 9.0}),
    ("Lamb", {"eps_inside_sqrt": True, "eps": 0.1}, lamb, {"inside": True, "eps": 0.1}),
    ("Lamb", {"betas": [0.0, 0.5]}, lamb, {"b1": 0.0, "b2": 0.5}),
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "params", "model", "numbers"), CASES)
def test_formula(kind, params, model, numbers):
    check(kind, params, model, numbers)


def test_rate_is_the_parameter_or_the_schedule(problem):
    p, grads = problem
    config = OptimizerConfig(type="SGD", params={"lr": 0.5})
    assert named_optimizer(config)[1] == 0.5
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    rate = schedule(scheduler, 0.5)
    assert named_optimizer(config, rate)[1] is rate
    want = sgd(p, grads, lr=[float(rate(count)) for count in range(STEPS)])
    for given in (rate, SchedulerConfig.of(scheduler)):
        np.testing.assert_allclose(run(config, p, grads, given), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "params", "model", "numbers"),
    [
        ("AdamW", {"weight_decay": 0.1}, adam, {"wd": 0.1}),
        ("Adam", {"bias_correction": False}, adam, {"correct": False}),
        ("Lion", {}, lion, {}),
        ("Lamb", {}, lamb, {}),
    ],
)
def test_one_cycle_moves_the_betas(kind, params, model, numbers):
    with jax.enable_x64(True):
        momentum, rate = momentum_schedule(CYCLE), schedule(CYCLE, 1.0)
        b1, lr = ([float(of(count)) for count in range(STEPS)] for of in (momentum, rate))
    assert len(set(b1)) > 5
    check(kind, params, model, {"b1": b1, "b2": 0.99, "lr": lr, **numbers}, CYCLE)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Muon"])
def test_optimizers_without_betas_keep_their_momentum(problem, kind):
    with pytest.warns(UserWarning, match=f"cycle_momentum has no effect: {kind} has no betas"):
        named_optimizer(OptimizerConfig(type=kind), CYCLE)
    still = SchedulerConfig(type="OneCycle", params={**CYCLE.params, "cycle_momentum": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        named_optimizer(OptimizerConfig(type=kind), still)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion", "SGD", "Adagrad", "Lamb", "Muon"])
def test_masks(problem, kind):
    p, grads = problem

    def tree_of(x):
        return {"dense": {"kernel": x, "bias": x[0]}, "ln_f": {"weight": x[1]}}

    params, grads = tree_of(p), [tree_of(g) for g in grads[:2]]

    def moved(decay, json=None, **mask):
        given = {"weight_decay": decay, **({"weight_decay_mask": json} if json else {})}
        return run(OptimizerConfig(type=kind, params=given), params, grads, **mask)

    plain, all_, some = moved(0.0), moved(0.1), moved(0.1, "no_bias_and_norm")

    def differ(a, b):
        return [
            not np.array_equal(x, y)
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        ]

    # Leaves in order: dense.bias, dense.kernel, ln_f.weight.
    assert differ(plain, all_) == [True, True, True]
    assert differ(plain, some) == [False, True, False]
    tree = {"dense": {"kernel": False, "bias": True}, "ln_f": False}
    only_bias = moved(0.1, "no_bias_and_norm", weight_decay_mask=tree)
    assert differ(plain, only_bias) == [True, False, False]
    by_function = moved(0.1, weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    assert differ(plain, by_function) == [False, True, False]


def test_a_mask_without_decay_is_reported():
    params = {"weight_decay_mask": "no_bias_and_norm"}
    with pytest.warns(UserWarning, match="weight_decay_mask has no effect: weight_decay is 0"):
        named_optimizer(OptimizerConfig(type="AdamW", params=params))


@pytest.mark.parametrize(
    ("kind", "params", "says"),
    [
        ("AdmaW", {}, 'did you mean "AdamW"'),
        ("AdamW", {"max_grad_norm": 1.0}, "use `gradient_clipping` at the top level"),
        ("AdamW", {"weight_decay_mask": "biases"}, 'one of "all", "no_bias_and_norm"'),
        ("AdamW", {"betas": [0.9, 1.0]}, "two numbers from 0 to below 1"),
        ("AdamW", {"lr": float("nan")}, "a finite number of at least 0"),
        ("Muon", {"per_head_muon": True}, "leave it out"),
        ("Muon", {"ns_steps": 6}, "ns_steps: unknown key"),
        ("OneBitLamb", {}, 'write "Lamb"'),
    ],
)
def test_bad_optimizers(kind, params, says):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(type=kind, params=params)
    assert says in str(caught.value)


def test_nesterov_needs_momentum():
    with pytest.raises(ConfigError, match="set it above 0"):
        named_optimizer(OptimizerConfig(type="SGD", params={"nesterov": True}))
