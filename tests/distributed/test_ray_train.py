"""Workers of Ray Train, with stand-ins for its modules as Ray 2.60 has them."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zerojax.distributed.launched import launched
from zerojax.distributed.ray_train import ray_train_variables


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    for member, value in members.items():
        setattr(module, member, value)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def worker(monkeypatch: pytest.MonkeyPatch, count: int, index: int) -> list[Any]:
    """Makes this process a worker; returns what it passes to the broadcast."""
    told: list[Any] = []
    context = SimpleNamespace(
        get_world_size=lambda: count,
        get_world_rank=lambda: index,
        get_local_world_size=lambda: count,
        get_local_rank=lambda: index,
    )

    def broadcast(data: Any) -> Any:
        told.append(data)
        return data or "10.0.0.1:4000"

    stand_in(monkeypatch, "ray")
    stand_in(monkeypatch, "ray.util", get_node_ip_address=lambda: "10.0.0.1")
    stand_in(monkeypatch, "ray.train", get_context=lambda: context)
    stand_in(monkeypatch, "ray.train.collective", broadcast_from_rank_zero=broadcast)
    return told


def test_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    told = worker(monkeypatch, 2, 1)
    me = launched(ray_train_variables())
    assert me is not None
    assert (me.coordinator, me.count, me.index, me.several_hosts) == ("10.0.0.1:4000", 2, 1, False)
    assert told == [None]


def test_worker_0_says_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    told = worker(monkeypatch, 2, 0)
    coordinator = ray_train_variables()["ZEROJAX_COORDINATOR"]
    assert told == [coordinator]
    host, port = coordinator.split(":")
    assert host == "10.0.0.1"
    assert 1024 < int(port) < 65536


def test_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_train_variables() == {}
    worker(monkeypatch, 1, 0)
    assert ray_train_variables() == {}

    def outside() -> None:
        raise RuntimeError("`get_context` cannot be used outside of a Ray Train training function")

    stand_in(monkeypatch, "ray.train", get_context=outside)
    assert ray_train_variables() == {}
