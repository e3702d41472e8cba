"""Rollouts, shortened: the reward rises."""

import re

import pytest
from typer.testing import CliRunner

from examples import rollouts

pytestmark = pytest.mark.usefixtures("quick_compile")


def test_it_prints_the_rewards() -> None:
    result = CliRunner().invoke(rollouts.app, ["--iterations", "13"], catch_exceptions=False)
    pattern = r"mean reward: (.*) at first, at last (.*)"
    rewards = re.fullmatch(pattern, result.output.splitlines()[-1])
    assert rewards is not None, result.output
    first, last = map(float, rewards.groups())
    assert last > first + 0.1
