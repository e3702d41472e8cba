"""What the benchmarks share: a console, a record of where they ran, and a JSON file of results."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 160
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "jax-cuda13-plugin",
)


def console() -> Console:
    """A console wide enough for the tables when its output goes to a file."""
    return Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def circumstances() -> dict[str, Any]:
    """Command, machine and versions: what a dated record of a result needs."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    command = " ".join(["python -m", *_module_and_arguments()])
    return {"command": command, "cores": os.cpu_count(), "versions": versions}


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """Write results with the circumstances they were measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **results}, indent=2) + "\n")


def _module_and_arguments() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [spec.name if spec else Path(sys.argv[0]).name, *sys.argv[1:]]
