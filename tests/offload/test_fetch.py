"""A state from host memory and from disk, for whoever evaluates with it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from offload.training import BATCH, create, train_step

import zerojax

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("where", ["device", "cpu", "nvme"])
def test_it_can_be_computed_with(tmp_path: Path, where: str) -> None:
    section: Any = {"device": None, "cpu": "cpu"}.get(
        where, {"device": "nvme", "nvme_path": str(tmp_path)}
    )
    zero = zerojax.zero(
        stage=3,
        stage3_param_persistence_threshold=0,
        mesh=zerojax.mesh(2),
        offload_optimizer=section,
        offload_param=section,
    )
    step, state = zero(train_step), zero.init(create)
    for _ in range(2):
        params = zerojax.on_device(state.params)
        for x, rest in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
            assert x.sharding.memory_kind == "device"
            assert x.sharding.spec == rest.sharding.spec
            np.testing.assert_array_equal(x, np.asarray(rest))
        loss = jax.jit(
            lambda p: jnp.mean(jnp.square(jnp.tanh(BATCH @ p["w"]) @ p["v"]))
        )(params)  # fmt: skip
        state, told = step(state, BATCH)
        np.testing.assert_allclose(loss, told, rtol=1e-6)


def test_other_leaves_are_left_alone() -> None:
    assert zerojax.on_device({"n": 3, "x": None}) == {"n": 3, "x": None}
