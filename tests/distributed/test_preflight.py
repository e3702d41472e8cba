"""Checks of records that processes make of themselves."""

import os
import socket
import stat
from pathlib import Path
from typing import Any

import jax
import pytest

from zerojax import ZeroConfig
from zerojax.distributed.launched import Launched
from zerojax.distributed.preflight import (
    config_hash,
    cpu_warnings,
    describe,
    devices_here,
    differences,
    local_devices,
    unequal_devices,
    unreachable,
    visible_gpus,
)

HERE = socket.gethostname()


def process(index: int, host: str = "n1", **differs: Any) -> dict[str, Any]:
    return {
        "index": index,
        "host": host,
        "versions": {"jax": "0.10.2", "zerojax": "1.0"},
        "config": "",
        "gpus": None,
        "cpus": 8,
        "all_cpus": 8,
        "quota": None,
        "proxy": "",
        "gloo_on_loopback": False,
        **differs,
    }


def problems(*records: dict[str, Any]) -> str:
    return "\n".join(differences([*records], "n1:4000"))


def test_processes_that_fit() -> None:
    assert not differences([process(n, f"n{n // 2}", config="a") for n in range(4)], "n0:1")


def test_versions() -> None:
    old = {"jax": "0.9.0", "zerojax": "1.0"}
    assert problems(process(0), process(1), process(2, "n2", versions=old)) == (
        "the version of jax differs: 0.10.2 in processes 0, 1; 0.9.0 in process 2. "
        "Remedy: install the same jax for all processes"
    )


def test_configs() -> None:
    said = problems(process(0, config="a"), process(1), process(2, config="b"))
    assert said.startswith("the config (its hash) differs: a in process 0; b in process 2. ")
    assert config_hash(ZeroConfig(stage=1)) == config_hash(ZeroConfig(stage=1))
    assert config_hash(ZeroConfig(stage=1)) != config_hash(ZeroConfig(stage=2))


def test_proxies() -> None:
    said = problems(process(0), process(1, proxy="http_proxy"), process(2, proxy="http_proxy"))
    assert "http_proxy would send what processes 1, 2 and process 0 tell each other" in said
    assert "add the host of n1:4000 to no_proxy" in said


@pytest.mark.parametrize(
    ("environ", "proxy"),
    [
        ({}, ""),
        ({"http_proxy": "p:1"}, "http_proxy"),
        ({"http_proxy": "p:1", "https_proxy": "p:1"}, "https_proxy"),
        ({"HTTP_PROXY": "p:1"}, ""),  # gRPC does not look at it
        ({"http_proxy": "p:1", "no_proxy": "localhost, .cluster"}, ""),
        ({"http_proxy": "p:1", "no_proxy": "other"}, "http_proxy"),
    ],
)
def test_proxies_that_grpc_takes(environ: dict[str, str], proxy: str) -> None:
    me = Launched("n1.cluster:4000", 2, 1, None, None, "torchrun")
    record = describe(me, None, environ)
    assert record["proxy"] == proxy
    assert (record["host"], record["pid"], record["gpus"]) == (HERE, os.getpid(), None)


def test_names_that_gloo_cannot_use() -> None:
    """As Debian's 127.0.1.1 in /etc/hosts; of no consequence on one host."""
    there = process(1, "n2", gloo_on_loopback=True)
    assert "/etc/hosts of n2 maps its own name to a loopback address" in problems(process(0), there)
    assert not problems(process(0, "n2"), there)


@pytest.mark.parametrize(
    ("coordinator", "index", "local", "refused"),
    [
        ("localhost:1", 0, 1, True),
        ("127.0.1.1:1", 1, 1, True),
        ("localhost:1", 1, 2, False),  # one host
        ("192.0.2.1:1", 1, 1, False),
        ("no-such-name.invalid:1", 1, 1, False),
    ],
)
def test_coordinator_at_a_loopback(coordinator: str, index: int, local: int, refused: bool) -> None:
    said = unreachable(Launched(coordinator, 2, index, local, 0, "torchrun"))
    assert bool(said) == refused
    if refused:
        assert f"the coordinator {coordinator} (torchrun) is the loopback of {HERE}" in said
        assert "name the host of process 0 by an address that the others reach" in said


def shares(*gpus: list[str]) -> list[list[int] | None]:
    return local_devices([process(n, gpus=each) for n, each in enumerate(gpus)])


def test_gpus_of_processes() -> None:
    all_gpus = ["a", "b", "c", "d"]
    assert shares(all_gpus) == [None]
    assert shares(["a"], ["b"]) == [None, None]  # as `zerojax launch` or srun bind them
    assert shares(*[all_gpus] * 4) == [[0], [1], [2], [3]]
    assert shares(all_gpus, all_gpus) == [[0, 1], [2, 3]]
    assert shares([], []) == [None, None]


@pytest.mark.parametrize(
    ("gpus", "says"),
    [
        ((["a"], ["a"]), "2 processes see the same 1 GPU: start at most one process a GPU"),
        ((["a", "b", "c"],) * 2, "3 GPUs cannot be shared evenly among 2 processes"),
        ((["a"], []), "no GPU is visible to process 1, and others see some: CUDA_VISIBLE_DEVICES"),
        ((["a", "b"], ["b"]), "some see a GPU that another sees too, and not the same ones"),
    ],
)
def test_gpus_that_do_not_suffice(gpus: tuple[list[str], ...], says: str) -> None:
    said = problems(*(process(n, gpus=each) for n, each in enumerate(gpus)))
    assert said.startswith("processes 0, 1 on n1: ")
    assert says in said


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, ["GPU-aa", "GPU-ab", "GPU-b"]),
        ("2,0", ["GPU-b", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]),
        ("1,7,0", ["GPU-ab"]),
        ("", []),
    ],
)
def test_visible_gpus(
    visible: str | None, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-aa; echo GPU-ab; echo GPU-b\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == seen


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert visible_gpus({}) is None


def test_few_cpus() -> None:
    assert not cpu_warnings([process(n) for n in range(8)])
    (said,) = cpu_warnings([process(n, cpus=1) for n in range(2)])
    assert "processes 0, 1 on n1 may use one CPU of 8" in said
    assert "mpirun --bind-to none" in said
    (said,) = cpu_warnings([process(n, all_cpus=2, cpus=2) for n in range(4)])
    assert "4 processes on n1 share 2 CPUs" in said
    (said,) = cpu_warnings([process(n, quota=1.5) for n in range(2)])
    assert "share 1.5 CPUs" in said


def test_devices_that_differ() -> None:
    one = {"count": 1, "kind": "gpu NVIDIA H100", "memory": 60_000_000_000}
    assert not unequal_devices([one, one | {"memory": 59_000_000_000}])
    said = unequal_devices([one, one, one | {"count": 2, "kind": "cpu cpu", "memory": None}])
    assert said == [
        "the kind of device differs: gpu NVIDIA H100 in processes 0, 1; cpu cpu in process 2. "
        "Remedy: use machines of one kind, or name the backend with JAX_PLATFORMS in all processes",
        "the number of devices differs: 1 in processes 0, 1; 2 in process 2. Remedy: give all "
        "processes as many: CUDA_VISIBLE_DEVICES, JAX_NUM_CPU_DEVICES",
    ]
    (memory,) = unequal_devices([one, one | {"memory": 30_000_000_000}])
    assert "JAX may use differs: 60.0 GB in process 0; 30.0 GB in process 1" in memory


def test_devices_at_hand() -> None:
    assert devices_here(jax.devices()) == {"count": 8, "kind": "cpu cpu", "memory": None}
