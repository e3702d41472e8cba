"""The results file: what was measured on which device, written after every measurement."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.measurement import ERROR
from benchmarks.report import circumstances

NAME = "gpu-day.json"
CUT = "cut off"
"""Key of a measurement that the budget ended: the next call tries again."""


class Journal:
    """The results of a folder.

    Args:
      folder: The folder of the results file, which may hold results of earlier calls.
      device: The name of the device that measures now.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._path, self.device = folder / NAME, device
        self._all: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._all = json.loads(self._path.read_text())["results"]

    @property
    def results(self) -> dict[str, Any]:
        """Figures of this kind of device, by the measurement's name."""
        return self._all.setdefault(self.device, {})

    def known(self, name: str) -> bool:
        """Returns whether a measurement ended, with an error or without, and was not cut off."""
        return name in self.results and CUT not in self.results[name]

    def failed(self) -> list[str]:
        """The measurements that ended with an error of their own."""
        return [name for name, each in self.results.items() if ERROR in each]

    def forget(self, name: str) -> None:
        self.results.pop(name, None)

    def write(self, name: str, figures: dict[str, Any]) -> None:
        """Adds a result; the file is complete at every moment."""
        self.results[name] = figures
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".new")
        text = json.dumps({**circumstances(), "results": self._all}, indent=1, default=str)
        written.write_text(text + "\n")
        os.replace(written, self._path)
