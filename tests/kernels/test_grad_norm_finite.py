"""The norm of gradients and whether they are finite, by every implementation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.running import IMPLEMENTATIONS, compiled_for_h100, random, run

from pallas_kernels import grad_norm_finite
from pallas_kernels.compat import kernels_in
from pallas_kernels.grad_norm_finite.arguments import TESTED

pytestmark = pytest.mark.usefixtures("quick_compile")


def found(implementation: str, grads: Any) -> Any:
    return run(implementation, lambda g: grad_norm_finite(g, implementation=implementation), grads)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_square_sum(implementation: str, dtype: Any) -> None:
    grads = [random(shape, dtype, i) for i, shape in enumerate(TESTED)]
    got = found(implementation, grads)
    wanted = sum(np.sum(np.square(np.asarray(g, np.float64))) for g in grads)
    np.testing.assert_allclose(got.square_sum, wanted, rtol=1e-6)
    assert got.finite


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(implementation: str) -> None:
    def at(place: Any, value: Any) -> Any:
        """Whether 1000 elements are finite, one of them ``value``."""
        grads = jnp.ones(1000).at[place].set(value)
        return grad_norm_finite([grads], implementation=implementation)

    places = jnp.asarray([0, 511, 895, 896, 999])
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        got = run(implementation, lambda p, v=value: [at(i, v) for i in p], places)
        assert not any(each.finite for each in got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extremes(implementation: str) -> None:
    """Squares overflow, or vanish: the gradients are finite all the same."""
    large = found(implementation, [jnp.full(300, 3e38)])
    assert large.finite
    assert np.isinf(large.square_sum)
    small = found(implementation, [jnp.full(300, 1e-42)])
    assert small.finite
    assert small.square_sum == 0


@pytest.mark.slow
@pytest.mark.gpu_compile
@pytest.mark.usefixtures("require_gpu_compiler")
@pytest.mark.parametrize("devices", [1, 8])
def test_one_launch_for_many_leaves(devices: int) -> None:
    def norm(grads: Any) -> Any:
        got = grad_norm_finite(grads, implementation="mosaic_gpu")
        return got.square_sum[None], got.finite[None]

    leaves = [jax.ShapeDtypeStruct((100_003,), jnp.bfloat16)] * 6
    compiled = compiled_for_h100(norm, leaves, devices=devices)
    assert kernels_in(compiled) == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000


def test_bad_input() -> None:
    with pytest.raises(TypeError, match=r"grads\['w'\] has dtype int32"):
        grad_norm_finite({"w": jnp.ones(3, jnp.int32)})
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        grad_norm_finite([jnp.ones(3)], implementation="cuda")
