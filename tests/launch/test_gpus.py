"""GPUs counted without JAX, and the CPUs next to them."""

import os
from pathlib import Path

import pytest

from zerojax.distributed.gpus import Gpu
from zerojax.launch.error import UsageError
from zerojax.launch.gpus import gpus, near_cpus

BUSES = ["0000:1b:00.0", "0000:43:00.0", "0000:9a:00.0"]


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver knows three GPUs."""
    rows = "\n".join(f"{i}, GPU-{i}aaa, 0000{bus.upper()}" for i, bus in enumerate(BUSES))
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat <<END\n{rows}\nEND\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, [("0", 0), ("1", 1), ("2", 2)]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [("2", 2), ("0", 0)]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, [("GPU-1a", 1)]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, [("1", 1)]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, [("0", 0), ("1", 1), ("2", 2)]),
    ],
)
def test_gpus_that_the_environment_leaves(
    environ: dict[str, str], found: list[tuple[str, int]]
) -> None:
    assert gpus(environ) == [Gpu(name, f"GPU-{i}aaa", BUSES[i]) for name, i in found]


@pytest.mark.usefixtures("three")
def test_a_gpu_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES=3: .* has 3 GPUs"):
        gpus({"CUDA_VISIBLE_DEVICES": "3"})


def test_without_nvidia_smi_the_driver_s_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    for bus in BUSES:
        (tmp_path / "driver/nvidia/gpus" / bus).mkdir(parents=True)
    assert gpus({}, tmp_path) == [Gpu(str(i), "", bus) for i, bus in enumerate(BUSES)]
    assert gpus({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, tmp_path) == [Gpu("GPU-1a", "GPU-1a", "")]
    assert gpus({}, tmp_path / "none") == []


def test_a_process_is_bound_next_to_its_gpu(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    device, node = tmp_path / "bus/pci/devices" / BUSES[0], tmp_path / "devices/system/node/node1"
    device.mkdir(parents=True)
    node.mkdir(parents=True)
    gpu = Gpu("0", "", BUSES[0])
    assert near_cpus(gpu, tmp_path) is None
    (device / "numa_node").write_text("1\n")
    (node / "cpulist").write_text(f"{mine[0]},4000-4095\n")
    assert near_cpus(gpu, tmp_path) == {mine[0]}
    (node / "cpulist").write_text("4000-4095\n")
    assert near_cpus(gpu, tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert near_cpus(gpu, tmp_path) is None
    assert near_cpus(None, tmp_path) is None
