"""Moments in bfloat16: rounded to neighbours, right in the mean, and right after many updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zerojax.optim.moments import bf16_moments, in_bf16, to_bf16

N = 4096


def wide(state: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)


def gradient(key: jax.Array) -> jax.Array:
    return 1e-3 * jax.random.normal(key, (N,))


def test_rounds_to_a_neighbour_and_right_in_the_mean() -> None:
    tx = optax.scale_by_adam()
    keys = jax.random.split(jax.random.key(0), 3)
    mu, nu = gradient(keys[0]).astype(jnp.bfloat16), jnp.square(gradient(keys[1]))

    def update(count: jax.Array) -> tuple[Any, Any]:
        state = optax.ScaleByAdamState(count, mu, nu.astype(jnp.bfloat16))
        _, exact = tx.update(gradient(keys[2]), wide(state))
        return bf16_moments(tx).update(gradient(keys[2]), state)[1], exact

    stored, exact = jax.jit(jax.vmap(update))(jnp.arange(500))
    for name in ("mu", "nu"):
        got, want = (np.asarray(getattr(s, name), np.float32) for s in (stored, exact))
        # A bfloat16 has 8 significant bits.
        _, exponent = np.frexp(want)
        ulp = np.ldexp(1.0, exponent - 8)
        assert (np.abs(got - want) < ulp).all()
        # The error of one rounding is up to an ulp, its deviation at most half of one.
        assert np.abs(((got - want) / ulp).mean(0)).max() < 5 * 0.5 / np.sqrt(500)
        # Nor are elements rounded alike.
        assert np.abs(((got - want) / ulp).mean(1)).max() < 5 * 0.5 / np.sqrt(N)


def test_the_second_moment_follows_and_would_stall_by_rounding_to_nearest() -> None:
    """b2 = 0.999: a change of 1e-3 is below half an ulp, of 2e-3 to 4e-3."""
    tx = optax.scale_by_adam()
    low = bf16_moments(tx)

    def update(states: Any, key: jax.Array) -> tuple[Any, None]:
        exact, stochastic, nearest = states
        g = gradient(key)
        after = tx.update(g, wide(nearest))[1]
        return (tx.update(g, exact)[1], low.update(g, stochastic)[1], to_bf16(after)), None

    start = tx.init(jnp.zeros(N))
    keys = jax.random.split(jax.random.key(1), 2000)
    (exact, *others), _ = jax.lax.scan(update, (start, to_bf16(start), to_bf16(start)), keys)
    stochastic, nearest = (wide(s).nu / exact.nu for s in others)
    assert abs(float(stochastic.mean()) - 1) < 0.005
    assert float(stochastic.std()) < 0.06
    assert float(nearest.mean()) > 1.15


def test_zeros_and_what_is_not_finite_stay() -> None:
    tx = bf16_moments(optax.scale_by_adam())
    g = jnp.array([0.0, jnp.inf, -jnp.inf, jnp.nan])
    _, state = tx.update(g, tx.init(jnp.zeros(4)))
    np.testing.assert_array_equal(state.mu.astype(np.float32), [0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(state.nu.astype(np.float32), [0, np.inf, np.inf, np.nan])


@pytest.mark.parametrize(
    "tx",
    [
        optax.adamw(1e-3, b1=0.8),
        optax.lamb(1e-3),
        optax.chain(optax.clip(1.0), optax.nadam(1e-3)),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        optax.partition({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
    ],
)
def test_all_else_of_a_state_is_as_before(tx: Any) -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
    low, state = bf16_moments(tx), tx.init(params)
    stored = low.init(params)
    assert jax.tree.structure(stored) == jax.tree.structure(state)
    assert in_bf16(stored)
    assert not in_bf16(state)
    for _ in range(2):
        updates, stored = low.update(params, stored, params)
        wanted, state = tx.update(params, state, params)
        for x, want in zip(jax.tree.leaves(updates), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, want, rtol=2e-2)
    for path, x in jax.tree.leaves_with_path(stored):
        names = {getattr(key, "name", None) for key in path}
        want = jnp.bfloat16 if names & {"mu", "nu"} else jnp.result_type(x)
        assert x.dtype == want, jax.tree_util.keystr(path)


def test_other_dtypes_stay() -> None:
    tx = bf16_moments(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    params = {"w": jnp.ones(3)}
    _, (state, _) = tx.update(params, tx.init(params), params)
    assert state.mu["w"].dtype == state.nu["w"].dtype == jnp.bfloat16
    exact, params = bf16_moments(optax.adam(1e-3)), {"c": jnp.ones(3, jnp.complex64)}
    _, (state, _) = exact.update(params, exact.init(params), params)
    assert state.mu["c"].dtype == jnp.complex64


def test_an_optimizer_without_two_moments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no two moments .* such as optax\.adamw, or remove"):
        bf16_moments(optax.sgd(0.1, momentum=0.9)).init(jnp.ones(3))
