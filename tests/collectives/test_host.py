"""Values that come in from host memory, and gradients that leave for it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import equations

from zerojax.collectives.host import Host, entry, fetch_to_device, send_to_host

STACK = np.arange(12, dtype="float32").reshape(4, 3)


def test_there_and_back() -> None:
    def around(x: jax.Array) -> Any:
        away = send_to_host(x)
        return fetch_to_device(away), entry(away, 2)

    moves = [
        eqn.params["devices"][0]
        for _, eqn in equations(jax.make_jaxpr(around)(STACK))
        if eqn.primitive.name == "device_put"
    ]
    assert moves == [jax.memory.Space.Host, *[jax.memory.Space.Device] * 2]
    whole, row = jax.jit(around)(STACK)
    np.testing.assert_array_equal(whole, STACK)
    np.testing.assert_array_equal(row, STACK[2])


def test_a_gradient_leaves_with_its_sum() -> None:
    host = Host(smallest=6, sums=lambda rows: rows**2)
    assert host.takes(jnp.ones(3), times=2)
    assert not host.takes(jnp.ones(3))
    row, total = jax.jit(host.send)(jnp.arange(3.0))
    np.testing.assert_array_equal(row, [0, 1, 2])
    assert total == 5
