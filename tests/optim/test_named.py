"""Named optimizers against DeepSpeed's formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.config import ConfigError, OptimizerConfig
from zerojax.optim.named import named_optimizer
from zerojax.optim.schedules import schedule

STEPS = 5


def run(config, params, grads, rate=None):
    tx, _ = named_optimizer(config, rate)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    for grad in grads:
        params, state = step(params, state, grad)
    return np.asarray(params)


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        [jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) for _ in range(STEPS)],
    )


def adam(p, grads, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, wd=0.0, l2=False, correct=True):
    p, m, v = np.float64(p), 0.0, 0.0
    for n, g in enumerate(grads, 1):
        g = np.float64(g) + (wd * p if l2 else 0)
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        c1, c2 = (1 - betas[0] ** n, 1 - betas[1] ** n) if correct else (1, 1)
        p = p - lr * (m / c1 / (np.sqrt(v / c2) + eps) + (0 if l2 else wd * p))
    return p


def lion(p, grads, lr=1e-3, betas=(0.9, 0.99), wd=0.0):
    p, m = np.float64(p), 0.0
    for g in map(np.float64, grads):
        p = p * (1 - lr * wd) - lr * np.sign(betas[0] * m + (1 - betas[0]) * g)
        m = betas[1] * m + (1 - betas[1]) * g
    return p


def sgd(p, grads, lr=1e-3, mu=0.0, nesterov=False, wd=0.0):
    p, m = np.float64(p), 0.0
    for g in map(np.float64, grads):
        g = g + wd * p
        m = mu * m + g
        p = p - lr * (g + mu * m if nesterov else m)
    return p


def adagrad(p, grads, lr=1e-2, eps=1e-10, wd=0.0):
    p, s = np.float64(p), 0.0
    for g in map(np.float64, grads):
        g = g + wd * p
        s = s + g * g
        p = p - lr * g / (np.sqrt(s) + eps)
    return p


def lamb(p, grads, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8, wd=0.0, low=0.01, high=10.0, correct=True):
    p, m, v = np.float64(p), 0.0, 0.0
    for n, g in enumerate(map(np.float64, grads), 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        u = m / (np.sqrt(v) + eps) + wd * p
        ratio = np.clip(np.linalg.norm(p) / np.linalg.norm(u), low, high)
        size = np.sqrt(1 - b2**n) / (1 - b1**n) if correct else 1
        p = p - lr * size * ratio * u
    return p


CASES = [
    ("Adam", {}, adam, {}),
    ("Adam", {"weight_decay": 0.1}, adam, {"wd": 0.1}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}, adam, {"wd": 0.1, "l2": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, adam, {"lr": 0.01, "wd": 0.1}),
    ("FusedAdam", {"betas": [0.8, 0.9], "eps": 1e-3}, adam, {"betas": (0.8, 0.9), "eps": 1e-3}),
    ("CPUAdam", {"bias_correction": False}, adam, {"correct": False}),
    ("Lion", {"weight_decay": 0.1, "lr": 0.01}, lion, {"wd": 0.1, "lr": 0.01}),
    ("SGD", {}, sgd, {}),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, sgd, {"mu": 0.9, "wd": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, sgd, {"mu": 0.9, "nesterov": True}),
    ("Adagrad", {"weight_decay": 0.1}, adagrad, {"wd": 0.1}),
    ("Lamb", {"weight_decay": 0.1, "lr": 0.01}, lamb, {"wd": 0.1, "lr": 0.01}),
    ("Lamb", {"bias_correction": False, "max_coeff": 0.3}, lamb, {"correct": False, "high": 0.3}),
]


@pytest.mark.parametrize(("kind", "params", "model", "numbers"), CASES)
def test_formula(problem, kind, params, model, numbers):
    p, grads = problem
    got = run(OptimizerConfig(type=kind, params=params), p, grads)
    np.testing.assert_allclose(got, model(p, grads, **numbers), rtol=2e-5, atol=2e-6)


def test_lamb_leaves_zero_parameters_their_plain_step():
    p, g = jnp.zeros((3,)), jnp.ones((3,))
    got = run(OptimizerConfig(type="Lamb", params={"lr": 0.1}), p, [g])
    np.testing.assert_allclose(got, -0.1 * np.ones(3), rtol=1e-4)


def test_rate_is_the_parameter_or_the_schedule(problem):
    p, grads = problem
    config = OptimizerConfig(type="SGD", params={"lr": 0.5})
    assert named_optimizer(config)[1] == 0.5
    rate = schedule(
        {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}, 0.5
    )
    assert named_optimizer(config, rate)[1] is rate
    want = np.asarray(p)
    for count, grad in enumerate(grads):
        want = want - float(rate(count)) * np.asarray(grad)
    np.testing.assert_allclose(run(config, p, grads, rate), want, rtol=1e-6, atol=1e-7)


def test_optax_finds_the_moments_in_the_state(problem):
    p, _ = problem
    for kind in ("AdamW", "Lion", "Adagrad", "Lamb"):
        tx, _ = named_optimizer(OptimizerConfig(type=kind, params={"weight_decay": 0.1}))
        state = tx.init({"w": p})
        marked = optax.tree_map_params(tx, lambda leaf: jnp.ones(()), state)
        moments = {"AdamW": 2, "Lion": 1, "Adagrad": 1, "Lamb": 2}[kind]
        ones = [leaf for leaf in jax.tree.leaves(marked) if leaf.dtype == jnp.float32]
        assert len(ones) == moments


def test_nesterov_needs_momentum():
    with pytest.raises(ConfigError, match="set it above 0"):
        named_optimizer(OptimizerConfig(type="SGD", params={"nesterov": True}))
