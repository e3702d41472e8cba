"""The process of one measurement: everything imported ahead, then one order from standard input.

    {"function": "smoke:report", "arguments": {}, "out": "/tmp/figures.json", "toy": false}

Importing starts no backend, so that a worker waits for its order without holding a GPU.
"""

import importlib
import inspect
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from benchmarks.gpu_day import plan
from benchmarks.gpu_day.measurement import failure

_PACKAGE = "benchmarks.gpu_day"


def perform(function: str, arguments: Mapping[str, object], out: Path) -> dict[str, object]:
    """Runs a function, and writes what it gives into ``out`` as the figures come."""
    began = time.perf_counter()
    figures: dict[str, object] = {}
    try:
        module, name = function.split(":")
        given = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)(**arguments)
        for part in given if inspect.isgenerator(given) else [given]:
            figures |= part
            _write(out, figures)
    except Exception as error:
        figures |= failure(error)
    figures["took"] = time.perf_counter() - began
    _write(out, figures)
    return figures


def _write(out: Path, figures: dict[str, object]) -> None:
    written = out.with_suffix(".new")
    written.write_text(json.dumps(figures, default=str))
    os.replace(written, out)


def main() -> None:
    for module in plan.MODULES:
        importlib.import_module(f"{_PACKAGE}.{module}")
    line = sys.stdin.readline()
    if not line:
        return  # not needed any more
    order = json.loads(line)
    if order["toy"]:
        jax.config.update("jax_platforms", "cpu")
    perform(order["function"], order["arguments"], Path(order["out"]))


if __name__ == "__main__":
    main()
