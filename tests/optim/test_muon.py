"""Muon against DeepSpeed's formula in NumPy, and which leaves it takes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.formulas import adam, muon

from zerojax.config import OptimizerConfig
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.optim.decay import names_on_path
from zerojax.optim.muon import has_matrices
from zerojax.optim.named import named_optimizer

STEPS = 10


def leaves(rng, dtype):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return {
        "up": {"kernel": normal(4, 6), "bias": normal(6)},
        "down": {"kernel": normal(6, 4)},
        "stack": {"kernel": normal(3, 4, 5), "bias": normal(3, 5)},
        "wte": {"embedding": normal(8, 4)},
        "lm_head": {"kernel": normal(4, 8)},
    }


def numbers_of(dtype):
    rng = np.random.default_rng(0)
    return leaves(rng, dtype), [leaves(rng, dtype) for _ in range(STEPS)]


@pytest.fixture(scope="module")
def problem():
    return numbers_of(jnp.float32)


def run(config, params, grads, scheduler=None):
    tx, rate = named_optimizer(config, scheduler)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
    return params, rate


def expected(params, grads, muon_knobs, adam_knobs):
    adam_knobs = {"b2": 0.95, "eps": 1e-10, **adam_knobs}

    def of(get):
        p, g = get(params), [get(grad) for grad in grads]
        # torch's [out, in] is the transpose of flax's.
        matrix = lambda p, g: muon(p.T, [x.T for x in g], **muon_knobs).T  # noqa: E731
        if p.ndim == 3:
            return np.stack([matrix(p[i], [x[i] for x in g]) for i in range(len(p))])
        return matrix(p, g)

    def rest(get):
        return adam(get(params), [get(grad) for grad in grads], **adam_knobs)

    return {
        "up": {"kernel": of(lambda t: t["up"]["kernel"]), "bias": rest(lambda t: t["up"]["bias"])},
        "down": {"kernel": of(lambda t: t["down"]["kernel"])},
        "stack": {
            "kernel": of(lambda t: t["stack"]["kernel"]),
            "bias": rest(lambda t: t["stack"]["bias"]),
        },
        "wte": {"embedding": rest(lambda t: t["wte"]["embedding"])},
        "lm_head": {"kernel": rest(lambda t: t["lm_head"]["kernel"])},
    }


def assert_near(got, want, atol):
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=0, atol=atol), got, want)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("params", "muon_knobs", "adam_knobs"),
    [
        ({}, {"lr": 0.02}, {"lr": 3e-4}),
        ({"lr": 0.01}, {"lr": 0.01}, {"lr": 0.01}),
        ({"lr": 0.01, "adam_lr": 1e-3}, {"lr": 0.01}, {"lr": 1e-3}),
        ({"muon_lr": 0.05, "momentum": 0.8}, {"lr": 0.05, "mu": 0.8}, {"lr": 3e-4}),
        ({"lr": 0.01, "weight_decay": 0.1, "ns_method": "standard"},
         {"lr": 0.01, "wd": 0.1}, {"lr": 0.01, "wd": 0.1}),
        ({"lr": 0.01, "betas": [0.8, 0.9], "eps": 0.1},
         {"lr": 0.01}, {"lr": 0.01, "b1": 0.8, "b2": 0.9, "eps": 0.1}),
    ],
)  # fmt: skip
def test_formula(problem, params, muon_knobs, adam_knobs):
    config = OptimizerConfig(type="Muon", params=params)
    with jax.enable_x64(True):
        p, grads = numbers_of(jnp.float64)
        assert_near(run(config, p, grads)[0], expected(p, grads, muon_knobs, adam_knobs), 1e-9)
    p, grads = problem
    assert_near(run(config, p, grads)[0], expected(p, grads, muon_knobs, adam_knobs), 2e-5)


@pytest.mark.parametrize("scan", [False, True])
def test_what_muon_takes_of_a_gpt(scan):
    config = GPTConfig(vocab_size=32, block_size=8, n_layer=2, n_head=2, n_embd=8, scan=scan)
    params = jax.eval_shape(GPT(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    taken = {
        ".".join(names_on_path(path)[-2:]): has_matrices(path, x)
        for path, x in jax.tree_util.tree_leaves_with_path(params["params"])
    }
    matrices = {name for name, muon in taken.items() if muon}
    assert matrices == {"c_attn.kernel", "c_proj.kernel", "c_fc.kernel"}
    assert {"wte.embedding", "wpe.embedding", "ln_1.scale", "c_attn.bias"} <= set(taken) - matrices
