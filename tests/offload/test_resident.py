"""Resident memory of a process whose state lies on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "resident.py"
# What the allocator gives back at once, so that resident memory is what is in use.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_ARENA_MAX": "2"}


@pytest.mark.sweep
def test_it_stays_within_its_bound_under_a_third_of_the_state(tmp_path: Path) -> None:
    """1.7 gigabytes on disk, 120 million parameters: their bf16 gradients are a quarter of one,
    and what is beside them has to do with the rest of a third."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "120"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["state"] > 1.4e9
    assert told["bound"] < told["state"] / 3, told
    assert told["birth"] < told["bound"], told
    assert told["peak"] < told["bound"], told
