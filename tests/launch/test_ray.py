"""A launch by Ray Train, where Ray is not installed; benchmarks/launchers.py runs it for real."""

import importlib.util
from pathlib import Path

import pytest
from launch.launched import launched


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_no_ray(tmp_path: Path) -> None:
    told = launched(tmp_path, "", "--ray", "--nproc-per-node", 2)
    assert told.status == 2
    assert "pip install -e '.[ray]'" in told.err


def test_a_dry_run_needs_no_ray(tmp_path: Path) -> None:
    told = launched(tmp_path, "", "--ray", "--nproc-per-node", 2, "--num-nodes", 3, "--dry-run")
    assert (told.status, "6 workers" in told.out) == (0, True)
