"""The GPUs of a process among those of its host."""

import os
import stat
from pathlib import Path

import pytest

from zerojax.distributed.gpus import installed_gpus, local_devices, visible_gpus


def shares(*gpus: list[str]) -> list[list[int] | None]:
    return local_devices([{"index": n, "gpus": each} for n, each in enumerate(gpus)])


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
        ((["a"], ["a"]), "2 processes cannot share 1 GPU evenly: start one"),
        ((["a", "b", "c"],) * 2, "2 processes cannot share 3 GPUs evenly"),
        ((["a"], []), "process 1 has no GPU, and others have some: unset CUDA_VISIBLE_DEVICES"),
        ((["a", "b"], ["b"]), "processes see some GPUs in common"),
    ],
)
def test_gpus_that_do_not_suffice(gpus: tuple[list[str], ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        shares(*gpus)


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
    tool.write_text("#!/bin/bash\nfor i in aa ab b; do echo $((n++)), GPU-$i, bus; done\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.uuid for gpu in visible_gpus(environ, installed_gpus() or [])] == seen


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert installed_gpus() is None
