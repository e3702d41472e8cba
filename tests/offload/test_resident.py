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
def test_it_stays_within_its_bound_under_a_quarter_of_the_state(tmp_path: Path) -> None:
    """Three gigabytes on disk, 250 million parameters: their bf16 gradients are half a gigabyte,
    and what is beside them has to do with the rest of a quarter."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), "240"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": str(SCRIPT.parents[2])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["state"] > 2.8e9
    assert told["bound"] < told["state"] / 4, told
    assert told["birth"] < told["bound"], told
    assert told["peak"] < told["bound"], told
