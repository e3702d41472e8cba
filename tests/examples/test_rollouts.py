"""Rollouts, shortened: the reward rises, nothing compiles twice, and the state stays in place."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import zerojax
from examples import rollouts

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_it_prints_the_rewards() -> None:
    result = CliRunner().invoke(rollouts.app, ["--iterations", "13"], catch_exceptions=False)
    pattern = r"mean reward: (.*) at first, at last (.*)"
    rewards = re.fullmatch(pattern, result.output.splitlines()[-1])
    assert rewards is not None, result.output
    first, last = map(float, rewards.groups())
    assert last > first + 0.1


def test_the_state_is_the_same_before_and_after_a_rollout(
    compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second iteration on nothing compiles."""
    generate, seen = zerojax.generate, []

    def recorded(model: Any, state: Any, *args: Any, **how: Any) -> jax.Array:
        arrays = jax.tree.leaves(state)
        buffers = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in arrays]
        tokens = generate(model, state, *args, **how)
        for x, before in zip(arrays, buffers, strict=True):
            assert [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] == before
        seen.append(tokens)
        return tokens

    monkeypatch.setattr(zerojax, "generate", recorded)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    history = rollouts.rewards(zero, 3)
    next(history)
    compiles.clear()
    assert len([*history]) == 2
    assert not compiles
    assert len({np.asarray(tokens).tobytes() for tokens in seen}) == 3
