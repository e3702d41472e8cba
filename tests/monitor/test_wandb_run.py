"""Runs of wandb, by a stand-in for the package: the real one wants an account."""

import sys
import types

import pytest

from zerojax.config import WandbConfig
from zerojax.monitor.wandb_run import WandbRun


@pytest.fixture
def wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.run, module.calls = None, []
    module.init = lambda **given: module.calls.append(("init", given))
    module.log = lambda values, step: module.calls.append(("log", values, step))
    module.finish = lambda: module.calls.append(("finish",))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_of_its_own(wandb):
    run = WandbRun(WandbConfig(project="p", team="t", group="g"))
    run.write([("loss", 0.5, 8), ("lr", 0.1, 8), ("loss", 0.25, 16)])
    run.close()
    assert wandb.calls == [
        ("init", {"project": "p", "entity": "t", "group": "g"}),
        ("log", {"loss": 0.5, "lr": 0.1}, 8),
        ("log", {"loss": 0.25}, 16),
        ("finish",),
    ]


def test_the_users_run_is_used_and_left_open(wandb):
    wandb.run = object()
    run = WandbRun(WandbConfig())
    run.write([("loss", 0.5, 8)])
    run.close()
    assert wandb.calls == [("log", {"loss": 0.5}, 8)]
