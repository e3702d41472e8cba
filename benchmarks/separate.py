"""A measurement in a process of its own: its memory, its devices and its environment."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PROGRAM = """
import dataclasses, importlib, json, sys
module, name, arguments = json.loads(sys.argv[1])
result = getattr(importlib.import_module(module), name)(*arguments)
print(json.dumps(result, default=dataclasses.asdict))
"""


def in_a_process(
    function: Callable[..., object],
    *arguments: str | float | bool | None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Calls a module's function in a new process and returns its result as JSON has it.

    Args:
      function: Returns a dataclass or a value for JSON.
      environment: All variables of the process; None for those of this one.

    Raises:
      RuntimeError: The process failed; the message ends with what it wrote to standard error.
    """
    module = function.__module__
    if module == "__main__":
        module = sys.modules[module].__spec__.name  # type: ignore[union-attr]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([module, function.__name__, arguments])],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function.__name__}{arguments}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
