"""Processes that compile as the tests do."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(compiled_in: dict[str, str], quick_compile: None) -> dict[str, str]:
    """For a process that shares the programs of `quick_compile`, and so its numbers too."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **compiled_in,
    }
