"""OneCycle against DeepSpeed's own way of computing its height, cycle by cycle."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.optim.one_cycle import cycled_momentum, cycled_rate


def deepspeed(params, t):
    """(rate, momentum) at t >= 0, by the share of the whole cycle that has gone."""
    up, down = params["cycle_first_step_size"], params["cycle_second_step_size"]
    whole, turn = up + down, up / (up + down)
    if t >= whole:
        every = params["decay_step_size"]
        gone = (t - whole + 1) / every if every else 0.0
        return (
            params["cycle_min_lr"] / (1 + params["decay_lr_rate"] * gone),
            params["cycle_max_mom"] * (1 + params["decay_mom_rate"] * gone),
        )
    x = (t + 1) / whole - math.floor((t + 1) / whole)
    height = x / turn if x <= turn else (x - 1) / (turn - 1)
    rise = params["cycle_max_lr"] - params["cycle_min_lr"]
    fall = params["cycle_max_mom"] - params["cycle_min_mom"]
    return params["cycle_min_lr"] + rise * height, params["cycle_max_mom"] - fall * height


@pytest.mark.parametrize(("up", "down"), [(1, 1), (3, 8), (8, 3), (5, 5)])
@pytest.mark.parametrize("every", [0, 1, 4])
def test_the_whole_run(up, down, every):
    params = {
        "cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": up,
        "cycle_second_step_size": down, "decay_lr_rate": 0.5, "decay_step_size": every,
        "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": -0.02,
    }  # fmt: skip
    t = jnp.arange(30)
    want = np.array([deepspeed(params, n) for n in range(30)]).T
    np.testing.assert_allclose(cycled_rate(params)(t), want[0], rtol=1e-6)
    np.testing.assert_allclose(cycled_momentum(params)(t), want[1], rtol=1e-6)
    assert float(cycled_rate(params)(jnp.asarray(-1))) == pytest.approx(0.1)
    assert float(cycled_momentum(params)(jnp.asarray(-1))) == pytest.approx(0.8)
