"""What a search tries of the values that the blocks of a small model keep."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax.config import load
from zerojax.foresight.choice import Choice, Remat
from zerojax.foresight.devices import parse_devices
from zerojax.tuning.cache import Cache
from zerojax.tuning.study import Study

pytestmark = [pytest.mark.gpu_compile, pytest.mark.usefixtures("kept", "require_gpu_compiler")]
LAYERS, WIDTH, SEQ, ROWS = 3, 256, 512, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        narrow = checkpoint_name(nn.Dense(WIDTH)(x), "narrow")
        wide = checkpoint_name(nn.Dense(4 * WIDTH)(jnp.sin(narrow)), "wide")
        return x + nn.Dense(WIDTH)(jnp.sin(wide)), None


class Model(nn.Module):
    remat: bool
    policy: str | None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, WIDTH)(tokens)
        policy = zerojax.remat_policy(self.policy) if self.policy else None
        block = nn.remat(Block, policy=policy, prevent_cse=False) if self.remat else Block
        variables, split = {"params": 0}, {"params": True}
        stack = nn.scan(block, variable_axes=variables, split_rngs=split, length=LAYERS)
        return nn.Dense(64)(stack()(x, None)[0])


def small(remat: bool = True, remat_policy: str | None = None) -> Model:
    return Model(remat, remat_policy)


@functools.cache
def study(kind: str = "h100") -> Study:
    mesh, rates = parse_devices(f"{kind}:2")
    config = load({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    return Study(small, config, mesh, rates, rows=None, seq=SEQ, measured=Cache())


def choice(remat: Remat, rows: int = ROWS) -> Choice:
    return Choice(stage=1, micro=rows, remat=remat)


def test_names_are_those_of_values_that_blocks_compute_again() -> None:
    assert [*study().names(choice(True))] == ["narrow", "wide"]
    assert [*study().names(choice("names:wide"))] == ["narrow"]
    assert [*study().names(choice(False))] == []
