"""Checks of records that processes make of themselves."""

import os
import socket
from typing import Any

import jax

from zerojax import ZeroConfig
from zerojax.config import OffloadOptimizer
from zerojax.distributed.preflight import (
    describe,
    devices_here,
    differences,
    settings,
    unequal_devices,
    unequal_settings,
)


def process(index: int, host: str = "n1", **differs: Any) -> dict[str, Any]:
    return {
        "index": index,
        "host": host,
        "versions": {"jax": "0.10.2", "zerojax": "1.0"},
        "settings": {},
        "gpus": None,
        "gloo_on_loopback": False,
        **differs,
    }


def problems(*records: dict[str, Any]) -> str:
    return "\n".join(differences([*records]))


def test_processes_that_fit() -> None:
    assert not differences([process(n, f"n{n // 2}", settings={"stage": "1"}) for n in range(4)])


def test_versions() -> None:
    old = {"jax": "0.9.0", "zerojax": "1.0"}
    assert problems(process(0), process(1), {"index": 2, "versions": old}) == (
        "the version of jax differs: 0.10.2 in processes 0, 1; 0.9.0 in process 2. "
        "Remedy: install the same jax for all processes"
    )


def test_configs() -> None:
    each = [
        settings(ZeroConfig(stage=stage, offload_optimizer=offload, steps_per_print=lines))
        for stage, offload, lines in (
            (1, OffloadOptimizer(device="nvme", nvme_path="/a"), 10),
            (1, OffloadOptimizer(device="nvme", nvme_path="/b"), None),  # its own disk, no lines
            (2, OffloadOptimizer(device="cpu"), None),
        )
    ]
    assert not unequal_settings(each[:2])
    stages, places = problems(*(process(n, settings=each[n]) for n in range(3)), process(3)).split(
        "\n"
    )
    assert stages == (
        "stage of the config differs: 1 in processes 0, 1; 2 in process 2. "
        "Remedy: give all processes the same config"
    )
    assert places.startswith("offload_optimizer of the config differs: {'device': 'nvme', ")


def test_names_that_gloo_cannot_use() -> None:
    """As Debian's 127.0.1.1 in /etc/hosts; of no consequence on one host."""
    there = process(1, "n2", gloo_on_loopback=True)
    assert "/etc/hosts of n2 maps its own name to a loopback address" in problems(process(0), there)
    assert not problems(process(0, "n2"), there)


def test_gpus() -> None:
    said = problems(process(0, gpus=["a"]), process(1, gpus=["a"]))
    assert said.startswith("processes 0, 1 on n1: 2 processes cannot share 1 GPU evenly")


def test_this_process() -> None:
    record = describe(ZeroConfig(stage=2), {})
    assert process(0).keys() <= {"index", *record}
    assert (record["host"], record["pid"]) == (socket.gethostname(), os.getpid())
    assert record["settings"]["stage"] == "2"
    assert record["versions"]["jax"] == jax.__version__


def test_devices_that_differ() -> None:
    one = {"count": 1, "kind": "gpu NVIDIA H100"}
    assert not unequal_devices([one, one])
    said = unequal_devices([one, one, one | {"count": 2, "kind": "cpu cpu"}])
    assert said == [
        "the kind of device differs: gpu NVIDIA H100 in processes 0, 1; cpu cpu in process 2. "
        "Remedy: use machines of one kind, or name the backend with JAX_PLATFORMS in all processes",
        "the number of devices differs: 1 in processes 0, 1; 2 in process 2. Remedy: give all "
        "processes as many: CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES",
    ]


def test_devices_at_hand() -> None:
    assert devices_here(jax.devices()) == {"count": 8, "kind": "cpu cpu"}
