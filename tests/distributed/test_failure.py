"""What a process leaves for its launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# In a process of its own: other threads may not write either.
PROGRAM = """
import resource
from zerojax.distributed.failure import leave

before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
leave("error", 1, "x" * 200)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
leave("error", 2, "x" * 200)
"""


def test_a_full_disk_leaves_no_half_traceback(tmp_path: Path) -> None:
    environment = os.environ | {"ZEROJAX_RUN_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "cannot write error.1" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["error.2"]
    assert (tmp_path / "error.2").read_text() == "x" * 200
