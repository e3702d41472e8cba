"""Where each part of a parameter lives, and devices that have no such place."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import zerojax
from zerojax.config import ZeroConfig
from zerojax.plan.places import (
    DEVICE,
    DISK,
    HOST,
    Places,
    check_memories,
    choose_places,
    offloads,
    reaches_host,
)

CPU = "cpu"
NVME = {"device": "nvme", "nvme_path": "/disk"}


def config(**keywords: Any) -> ZeroConfig:
    return ZeroConfig.from_keywords(
        stage=3, **{"stage3_param_persistence_threshold": 0, **keywords}
    )


@pytest.mark.parametrize(
    ("optimizer", "param", "expected"),
    [
        (None, None, Places(DEVICE, DEVICE, DEVICE)),
        (CPU, None, Places(HOST, HOST, DEVICE)),
        (NVME, None, Places(DISK, DISK, DEVICE)),
        (None, CPU, Places(HOST, DEVICE, HOST)),
        (CPU, CPU, Places(HOST, HOST, HOST)),
        (NVME, CPU, Places(DISK, DISK, HOST)),
    ],
)
def test_the_table(optimizer: Any, param: Any, expected: Places) -> None:
    made = config(offload_optimizer=optimizer, offload_param=param)
    assert choose_places(made, [10, 1000]) == [expected] * 2
    assert offloads(made) == reaches_host(made) == (expected != Places(DEVICE, DEVICE, DEVICE))


def test_small_parameters_stay_for_the_step() -> None:
    made = config(offload_optimizer=CPU, offload_param=CPU, stage3_param_persistence_threshold=100)
    assert [x.compute for x in choose_places(made, [99, 100, 101])] == [DEVICE, HOST, HOST]
    assert {(x.master, x.moments) for x in choose_places(made, [99, 100, 101])} == {(HOST, HOST)}
    alone = config(offload_param=CPU, stage3_param_persistence_threshold=100)
    assert [x.master for x in choose_places(alone, [99, 100])] == [DEVICE, HOST]


@pytest.mark.parametrize("section", [CPU, NVME])
def test_one_number_stays_on_the_device(section: Any) -> None:
    made = config(offload_optimizer=section, offload_param=CPU)
    assert choose_places(made, [1, 2])[0] == Places(DEVICE, DEVICE, DEVICE)
    assert choose_places(made, [1, 2])[1].master != DEVICE


@pytest.mark.parametrize(
    ("ratio", "kept"),
    [
        (1.0, set()),
        (0.9, {0}),  # 100 of 1000 elements: the next one would not fit
        (0.7, {0, 3}),
        (0.6, {0, 3}),
        (0.5, {0, 1, 3}),  # exactly half
        (0.3, {0, 1, 3}),
    ],
)
def test_a_share_stays_on_the_device(ratio: float, kept: set[int]) -> None:
    """The smallest first, as many as fit."""
    elements = [60, 300, 500, 140]
    made = config(offload_optimizer={"device": "cpu", "ratio": ratio})
    found = choose_places(made, elements)
    assert {i for i, x in enumerate(found) if x.moments == DEVICE} == kept
    assert all(x.master == x.moments and x.compute == DEVICE for x in found)
    assert sum(elements[i] for i in kept) <= (1 - ratio) * sum(elements) + 1e-6


def test_activations_alone_reach_the_host() -> None:
    made = config(cpu_checkpointing=True)
    assert reaches_host(made)
    assert not offloads(made)


def device(*kinds: str) -> Any:
    """One that has these memories."""
    return SimpleNamespace(
        platform="tpu",
        device_kind="TPU v2",
        addressable_memories=lambda: [SimpleNamespace(kind=kind) for kind in kinds],
    )


def mesh_of(device: Any) -> Any:
    return SimpleNamespace(devices=np.array([device], dtype=object))


@pytest.mark.parametrize(
    ("keywords", "named", "remedy"),
    [
        ({"offload_optimizer": CPU}, "offload_optimizer needs", "remove it from"),
        ({"offload_optimizer": NVME}, "offload_optimizer needs", "remove it from"),
        (
            {"offload_optimizer": CPU, "offload_param": CPU},
            "offload_optimizer and offload_param needs",
            "remove them from",
        ),
        ({"cpu_checkpointing": True}, "cpu_checkpointing needs", "remove it from"),
    ],
)
def test_no_pinned_host_memory(keywords: Any, named: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=rf"{named} pinned_host memory, but tpu .*TPU v2") as told:
        check_memories(config(**keywords), mesh_of(device("device", "unpinned_host")))
    assert "has only device, unpinned_host" in str(told.value)
    assert remedy in str(told.value)
    check_memories(config(**keywords), mesh_of(device("device", "pinned_host")))


def test_devices_that_are_only_compiled_for_are_not_asked() -> None:
    check_memories(config(offload_optimizer=CPU), mesh_of(device()))
    check_memories(config(), mesh_of(device("device")))
    check_memories(config(offload_optimizer=CPU), zerojax.mesh())
