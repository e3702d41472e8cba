"""The rules of 1-bit Lamb and 0/1 Adam against DeepSpeed's, on one process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.config import OptimizerConfig
from zerojax.experimental.choice import OPTIMIZERS
from zerojax.experimental.one_bit import one_bit_state, sending
from zerojax.optim.named import named_optimizer

STEPS, LR = 9, 0.01


def start() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}


def gradient(i: int) -> dict[str, Any]:
    rng = np.random.default_rng(100 + i)
    return {"a": rng.normal(size=(3, 4)), "b": 0.1 * rng.normal(size=5)}


def trained(kind: str, **params: Any) -> tuple[dict[str, Any], Any]:
    named = OptimizerConfig(type=kind, params={"lr": LR, **params})
    tx, _ = named_optimizer(named, further_rules=OPTIMIZERS)
    now = jax.tree.map(jnp.asarray, start())
    state = tx.init(now)
    for i in range(STEPS):
        updates, state = jax.jit(tx.update)(gradient(i), state, now)
        now = jax.tree.map(jnp.add, now, updates)
    return now, state


def lamb(p: Any, name: str, freeze: int, decay: float) -> Any:
    m, v, fresh, kept, last = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p), 0.0, 1.0
    for i in range(STEPS):
        g = gradient(i)[name]
        m = 0.9 * m + 0.1 * g
        fresh = 0.999 * fresh + 0.001 * g * g
        if i < freeze:
            v = fresh
            u = m / (np.sqrt(v) + 1e-8) + decay * p
            ratio = np.clip(np.linalg.norm(p) / np.linalg.norm(u), 0.01, 10)
            kept = 0.9 * kept + 0.1 * ratio
            p = p - LR * ratio * u
        else:
            bare = m / (np.sqrt(v) + 1e-8)
            u = bare + decay * p
            factor = np.max((np.sqrt(v) + 1e-8) / (np.sqrt(fresh) + 1e-8))
            share = min(1.0, np.linalg.norm(bare) / np.linalg.norm(u))
            factor = np.clip(factor * share + 1 - share, 0.5, 4)
            last = np.clip(factor, 0.9 * last, 1.1 * last)
            p = p - LR * kept * last * u
    return p


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("freeze", [4, 100])
def test_one_bit_lamb(freeze: int, decay: float) -> None:
    got, _ = trained("OneBitLamb", freeze_step=freeze, weight_decay=decay, bias_correction=False)
    for name, p in start().items():
        np.testing.assert_allclose(got[name], lamb(p, name, freeze, decay), rtol=1e-6)


@pytest.mark.usefixtures("in_float64")
def test_the_warm_up_of_one_bit_lamb_is_lamb() -> None:
    got, _ = trained("OneBitLamb", weight_decay=0.1)
    want, _ = trained("Lamb", weight_decay=0.1)
    for name in got:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)


@pytest.mark.usefixtures("in_float64")
def test_zero_one_adam_updates_its_variance_more_and_more_rarely() -> None:
    given = {"var_update_scaler": 2, "var_freeze_step": 6, "bias_correction": False}
    got, state = trained("ZeroOneAdam", local_step_clipper=1, **given)
    # Updates 1 and 2, then every second: 4 and 6, then every fourth, of which 7 is the last.
    for name, p in start().items():
        m, v = np.zeros_like(p), np.zeros_like(p)
        for i in range(STEPS):
            g = gradient(i)[name]
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g if i + 1 in (1, 2, 4, 6) else v
            p = p - LR * m / (np.sqrt(v) + 1e-8)
        np.testing.assert_allclose(got[name], p, rtol=1e-6)
    adam = one_bit_state(state)
    assert adam is not None
    assert int(adam.squares) == 4


@pytest.mark.slow
def test_zero_one_adam_sends_gradients_and_then_momenta() -> None:
    params = {"lr": LR, "var_update_scaler": 2, "var_freeze_step": 6, "local_step_clipper": 1}
    config = OptimizerConfig(type="ZeroOneAdam", params=params)
    tx, _ = named_optimizer(config, further_rules=OPTIMIZERS)
    now = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start())
    state, found = tx.init(now), []
    for i in range(STEPS):
        adam = one_bit_state(state)
        assert adam is not None
        how = sending(adam, config.with_defaults())
        found.append((bool(how.plain), round(float(how.beta), 2), bool(how.anew)))
        _, state = tx.update(jax.tree.map(jnp.asarray, gradient(i)), state, now)
    plain, bits = (True, 0.0, False), (False, 0.0, False)
    momentum = [(False, 0.9, True), (False, 0.9, False)]
    assert found == [plain, plain, bits, plain, bits, plain, bits, *momentum]
