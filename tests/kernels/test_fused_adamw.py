"""AdamW in one pass: every implementation against the formula in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernels.running import (
    IMPLEMENTATIONS,
    assert_close,
    calls_of,
    compiled_for_h100,
    random,
    run,
)

from pallas_kernels import compat, fused_adamw
from pallas_kernels.fused_adamw import reference
from pallas_kernels.fused_adamw.arguments import MEASURED, TESTED

pytestmark = pytest.mark.usefixtures("quick_compile")

HYPER = {"count": 7, "learning_rate": 0.01, "b1": 0.8, "b2": 0.99, "eps": 1e-6, "scale": 0.25}


def state(low: Any = jnp.float32) -> list[dict[str, jax.Array]]:
    def tree(seed: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        return {f"{s}": random(s, dtype, seed + i) for i, s in enumerate(TESTED)}

    return [tree(0, low), tree(10), tree(20), jax.tree.map(jnp.square, tree(30))]


def formula(g: Any, p: Any, mu: Any, nu: Any, decay: float, decoupled: bool) -> list[np.ndarray]:
    g, p, mu, nu = (np.asarray(x, np.float64) for x in (g, p, mu, nu))
    b1, b2, t = HYPER["b1"], HYPER["b2"], HYPER["count"]
    g = g * HYPER["scale"] + (0 if decoupled else decay * p)
    mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
    step = mu / (1 - b1**t) / (np.sqrt(nu / (1 - b2**t)) + HYPER["eps"])
    return [p - HYPER["learning_rate"] * (step + (decay * p if decoupled else 0)), mu, nu]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("low", "decoupled"), [(jnp.float32, True), (jnp.bfloat16, False), (jnp.float16, True)]
)
def test_formula(implementation: str, low: Any, decoupled: bool) -> None:
    given = state(low)

    def update(*trees: Any) -> Any:
        return fused_adamw(
            *trees,
            **HYPER,
            weight_decay=0.1,
            decoupled=decoupled,
            copy_dtype=low,
            implementation=implementation,
        )

    got = run(implementation, update, *given)
    for key in given[0]:
        wanted = formula(*(tree[key] for tree in given), decay=0.1, decoupled=decoupled)
        for x, y in zip(got[:3], wanted, strict=True):
            assert x[key].dtype == jnp.float32
            assert_close(x[key], y, jnp.float32)
        np.testing.assert_array_equal(got.copy[key], got.params[key].astype(low))


def test_it_is_optax_adamw() -> None:
    given = state()
    g, p, *_ = given
    tx = optax.adamw(0.01, weight_decay=0.1)
    opt: Any = tx.init(p)
    zeros = jax.tree.map(jnp.zeros_like, p)
    got: Any = (p, zeros, zeros)

    @jax.jit
    def by_optax(p: Any, opt: Any) -> Any:
        updates, opt = tx.update(g, opt, p)
        return optax.apply_updates(p, updates), opt

    @jax.jit
    def fused(count: Any, *trees: Any) -> Any:
        return fused_adamw(g, *trees, count=count, learning_rate=0.01, weight_decay=0.1)[:3]

    for count in (1, 2, 3):
        p, opt = by_optax(p, opt)
        got = fused(count, *got)
    jax.tree.map(lambda x, y: assert_close(x, y, jnp.float32), got[0], p)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("copy", [None, jnp.float16])
def test_a_step_that_overflowed_changes_nothing(implementation: str, copy: Any) -> None:
    g, *rest = state()
    g = jax.tree.map(lambda x: x.at[0].set(jnp.inf), g)

    def update(run: jax.Array, *trees: Any) -> Any:
        return fused_adamw(*trees, **HYPER, run=run, copy_dtype=copy, implementation=implementation)

    got = run(implementation, update, jnp.asarray(False), g, *rest)
    jax.tree.map(np.testing.assert_array_equal, list(got[:3]), rest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extremes(implementation: str) -> None:
    """As the formula has it: what is not finite spreads to its own element alone, and moments so
    small that they are denormal do not divide by zero."""
    values = [np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, 1e-44, 65504.0]
    g = {"w": jnp.asarray(values * 16, jnp.float32)}
    p, mu, nu = ({"w": jnp.full(128, x, jnp.float32)} for x in (1.0, 0.5, 0.25))

    def update(*trees: Any) -> Any:
        return fused_adamw(*trees, **HYPER, implementation=implementation)

    got = run(implementation, update, g, p, mu, nu)
    wanted = run("xla", lambda *trees: fused_adamw(*trees, **HYPER), g, p, mu, nu)
    for x, y in zip(got[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(x["w"], y["w"], rtol=1e-5)
    tiny = {"w": jnp.full(128, 1e-42, jnp.float32)}
    zero = jax.tree.map(jnp.zeros_like, tiny)
    assert np.isfinite(run(implementation, update, tiny, zero, zero, zero).params["w"]).all()


def test_a_second_call_traces_nothing() -> None:
    given = [random((384,), seed=seed) for seed in range(4)]

    def update() -> Any:
        return fused_adamw(*given, **HYPER, copy_dtype=jnp.float16, implementation="mosaic_gpu")

    first, second = calls_of(reference, "update", update)
    assert 0 < first == second


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [1, 8])
def test_one_launch_for_many_leaves_and_no_second_copy(devices: int) -> None:
    leaves = [jax.ShapeDtypeStruct((2**20,), jnp.float32)] * 5
    low = [jax.ShapeDtypeStruct((2**20,), jnp.bfloat16)] * 5

    def update(*trees: Any) -> Any:
        return fused_adamw(
            *trees,
            **HYPER,
            copy_dtype=jnp.bfloat16,
            implementation="mosaic_gpu",
        )

    found = compiled_for_h100(
        update, low, leaves, leaves, leaves, devices=devices, donate=(1, 2, 3)
    )
    assert compat.kernels_in(found) == 1
    extra = found.memory_analysis().temp_size_in_bytes
    assert extra < 2**20 if compat.IN_PLACE else extra < 5 * 12 * 2**20 + 2**20


def test_what_is_measured_is_what_it_says() -> None:
    one, many = MEASURED
    assert one.bytes == 28 * 2**28
    assert len(many.arguments[1]) == 500


def test_bad_input() -> None:
    x = {"w": jnp.ones(3)}
    keywords = {"count": 1, "learning_rate": 0.1}
    with pytest.raises(ValueError, match="mu is a tree"):
        fused_adamw(x, x, jnp.ones(3), x, **keywords)
    with pytest.raises(ValueError, match=r"grads\['w'\] has shape \(4,\), the parameter \(3,\)"):
        fused_adamw({"w": jnp.ones(4)}, x, x, x, **keywords)
    with pytest.raises(TypeError, match=r"grads\['w'\] has dtype int32"):
        fused_adamw({"w": jnp.ones(3, jnp.int32)}, x, x, x, **keywords)
    with pytest.raises(ValueError, match="there are no parameters"):
        fused_adamw({}, {}, {}, {}, **keywords)
    with pytest.raises(ValueError, match="needs an H100, H200 or B200, and this runs on cpu"):
        fused_adamw(x, x, x, x, **keywords, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'triton'"):
        fused_adamw(x, x, x, x, **keywords, implementation="triton")
