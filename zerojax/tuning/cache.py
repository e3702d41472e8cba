"""What was measured of compiled programs, kept on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax

from zerojax.devices.rates import Rates
from zerojax.devices.topology import device_kinds
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import Measurement, measure
from zerojax.foresight.forecast import Traffic

VERSIONS = ("zerojax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
MEASURING = ("hlo", "foresight", "devices", "xla")
"""Rooms whose code decides what is measured: a change of theirs measures anew."""
KEPT = 2000
"""Programs that are kept; those not asked for the longest go first."""


class Cache:
    """Measures each program once, on this machine: a :data:`zerojax.foresight.costs.Measure`.

    What is remembered took 0 seconds to compile.

    A program is known by its lowered text, which has the number of its devices, by their figures,
    and by the versions of the compiler and of zerojax.

    Args:
      folder: by default ``zerojax/plans`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Attributes:
      hits, misses: programs found and programs compiled.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = base / "zerojax" / "plans" if folder is None else folder
        self.hits = self.misses = 0

    def __call__(
        self, lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates
    ) -> Measurement:
        path = self._folder / f"{_key(lowered, known, rates)}.json"
        try:
            found = json.loads(path.read_text())
            found["traffic"] = tuple(map(_traffic, found["traffic"]))
            made = Measurement(**found | {"compile_seconds": 0.0})
            os.utime(path)
        except (OSError, ValueError, TypeError, KeyError):  # not there, or cut off
            self.misses += 1
            made = measure(lowered, known, rates)
            self._keep(path, json.dumps(dataclasses.asdict(made)))
        else:
            self.hits += 1
        return made

    def _keep(self, path: Path, text: str) -> None:
        """Writes a file at once or not at all; a folder that cannot be written is no error."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                file.write(text)
            os.replace(file.name, path)
            newest = sorted(self._folder.glob("*.json"), key=lambda each: -each.stat().st_mtime)
            for old in newest[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError:
            return


def _key(lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates) -> str:
    digest = hashlib.sha256(lowered.as_text().encode())
    package = Path(__file__).parents[1]
    for room in MEASURING:
        for source in sorted((package / room).glob("*.py")):
            digest.update(source.read_bytes())
    flags = [os.environ.get(name) for name in FLAGS]
    speeds = dataclasses.replace(rates, memory=0)  # what is free differs from run to run
    figures = dataclasses.asdict(speeds), sorted(known.params), known.vocabulary, device_kinds()
    digest.update(repr((figures, flags, [_version(name) for name in VERSIONS])).encode())
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return ""


def _traffic(found: dict[str, object]) -> Traffic:
    return Traffic(**found | {"dtypes": tuple(found["dtypes"])})  # type: ignore[arg-type]
