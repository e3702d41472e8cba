"""Frozen arrays are left out of a step, whose record has their checksums."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equal import zero_for
from flax import nnx
from flax.training.train_state import TrainState

import zerojax
from zerojax.checkpoint import Checkpointer, CheckpointError
from zerojax.checkpoint.saved import SavedArrays

pytestmark = pytest.mark.usefixtures("quick_compile")


class AdapterState(TrainState):
    base: Any


def create_linen(key: jax.Array, width: int = 64) -> AdapterState:
    params = {"a": jax.random.normal(jax.random.key(0), (width, 8))}
    weights = {"w": jax.random.normal(key, (width, width))}
    base = zerojax.quantize_weights(weights, "nf4", group_size=8, select=lambda *_: True)
    return AdapterState.create(apply_fn=None, params=params, base=base, tx=optax.adam(1e-3))


class Adapted(nnx.Module):
    def __init__(self, key: jax.Array) -> None:
        self.base = nnx.Param(create_linen(key).base["w"])
        self.low = nnx.LoRAParam(jax.random.normal(jax.random.key(0), (64, 8)))


def create_nnx(key: jax.Array) -> Any:
    model = Adapted(key)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)


def arrays(state: Any) -> Any:
    return jax.tree.leaves(nnx.state(state) if isinstance(state, tuple) else state)


@pytest.mark.parametrize("create", [create_linen, create_nnx])
def test_the_trained_part_is_restored_beside_the_same_base(create: Any, tmp_path: Path) -> None:
    zero, key = zero_for(3, small_array_size=0), jax.random.key(1)
    saved = zero.init(create, key)
    with Checkpointer(tmp_path, zero) as checkpointer:
        checkpointer.save(1, saved, frozen=lambda name: "base" in name)
    assert not any("base" in name for name in SavedArrays(tmp_path / "1").names)
    other = zero_for(1, axes=4)
    state = other.init(create, key)
    with Checkpointer(tmp_path, other) as checkpointer:
        restored = checkpointer.restore(state)
        for x, y, z in zip(*map(arrays, (restored, saved, state)), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.sharding.is_equivalent_to(z.sharding, x.ndim)
        with pytest.raises(CheckpointError, match=r"base\S* .* checksum .* more arrays too"):
            checkpointer.restore(other.init(create, jax.random.key(2)))


def test_what_the_caller_lacks_is_named(tmp_path: Path) -> None:
    zero = zero_for(3)
    state = zero.init(create_linen, jax.random.key(1))
    with Checkpointer(tmp_path, zero) as checkpointer:
        with pytest.raises(CheckpointError, match=r"base.w.qvalue is uint4.* frozen=..."):
            checkpointer.save(1, state)
        checkpointer.save(1, state, frozen=lambda name: name.startswith("base."))
        abstract = zero.abstract_state(create_linen, jax.random.key(1))
        with pytest.raises(CheckpointError, match=r"base.w.qvalue was left out as frozen"):
            checkpointer.restore(abstract)
        wide = abstract.replace(base=zero.init(create_linen, jax.random.key(1), 72).base)
        with pytest.raises(CheckpointError, match=r"was uint4\[64, 64\], not uint4\[72, 72\]"):
            checkpointer.restore(wide)
        params = checkpointer.restore(abstract.params)  # which need no base
        np.testing.assert_array_equal(params["a"], state.params["a"])
        assert int(jnp.sum(params["a"] != 0))
