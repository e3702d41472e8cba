"""The models that have names: each resolves, and has the size that it is known by."""

import importlib
import math
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.models.registry import GROUP

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
NAMES: dict[str, str] = PYPROJECT["project"]["entry-points"][GROUP]

SIZES = {
    "mini": 1_298_880,
    "gpt2": 124_475_904,
    "gpt2-medium": 354_871_296,
    "gpt2-large": 774_090_240,
    "gpt2-xl": 1_557_686_400,
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama3-8b": 8_030_261_248,
    "llama-70b": 68_976_648_192,
}
# Hugging Face's `microsoft/deberta-v2-xlarge` with pooler and two classes, by the config on its
# page, and `facebook/blenderbot-400M-distill`.
WORKLOADS = {"deberta-v2-xlarge": 886_957_058, "blenderbot-400m": 364_802_560}
ALIASES = {f"{n}b": f"llama-{n}b" for n in (7, 13, 30, 65, 70)}


def find(name: str) -> Any:
    module, _, function = NAMES[name].partition(":")
    return getattr(importlib.import_module(module), function)


def parameters(model: Any) -> int:
    made = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made["params"]))


def test_every_name_is_known() -> None:
    assert NAMES.keys() == SIZES.keys() | ALIASES.keys() | WORKLOADS.keys()
    for alias, name in ALIASES.items():
        assert find(alias) is find(name)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    model = find(name)(seq=64)
    assert parameters(model) == SIZES[name]
    assert (model.config.scan, model.config.remat) == (True, True)
    plain = find(name)(seq=64, remat=False, scan=False)
    assert (plain.config.scan, plain.config.remat) == (False, False)
    assert find(name)(remat_policy="dots").config.remat == "dots"
    assert find(name)(remat=False, remat_policy="dots").config.remat is False


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes_of_workloads(name: str) -> None:
    made = find(name)(zerojax.zero(stage=2), rows=40, seq=128)
    state = jax.eval_shape(made.create_state, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params)) == WORKLOADS[name]
    assert made.batch["input_ids"].shape == (40, 128)


@pytest.mark.parametrize("name", ["mini", "gpt2-xl", "llama-7b"])
def test_longer_rows(name: str) -> None:
    """GPT-2 has a row in a table for each position, Llama none; shorter ones change neither."""
    model = find(name)(seq=5000)
    assert model.config.block_size == 5000
    more = 0 if "llama" in name else (5000 - find(name)().config.block_size) * model.config.n_embd
    assert parameters(model) == SIZES[name] + more
    assert find(name)(seq=1).config == find(name)().config
