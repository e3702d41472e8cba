"""Cache of measurements of compiled programs, on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import jax
import pydantic

from zerojax.devices.rates import Rates
from zerojax.devices.topology import device_kinds
from zerojax.foresight.attribution import ParameterShapes
from zerojax.foresight.costs import Measure, Measurement, measure
from zerojax.xla import compat

VERSIONS = ("zerojax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
MEASURING = ("hlo", "foresight", "devices", "xla")
"""Subpackages whose code determines a measurement; a change in them invalidates old entries."""
_MEASUREMENT = pydantic.TypeAdapter(Measurement)
KEPT = 2000
"""Maximum number of cached measurements; the least recently used are evicted first."""


class Cache:
    """A :data:`zerojax.foresight.costs.Measure` that measures each program once on this machine.

    The key is a hash of the program's lowered text, which contains the number of devices, of the
    parameters' shapes, the devices' rates and nodes, the compiler options and flags, the versions
    of the compiler and of zerojax, and the code of :data:`MEASURING`. A cached measurement has 0
    compile seconds.

    Args:
      folder: The folder of the cache; None for ``zerojax/plans`` in ``$XDG_CACHE_HOME`` or
        ``~/.cache``.
      measured: Measures a program that the cache lacks.

    Attributes:
      hits: The number of programs found in the cache.
      misses: The number of programs compiled.
    """

    hits: int
    misses: int

    def __init__(self, folder: Path | None = None, measured: Measure = measure) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = base / "zerojax" / "plans" if folder is None else folder
        self._measured = measured
        self.hits = self.misses = 0

    def __call__(
        self,
        lowered: jax.stages.Lowered,
        known: ParameterShapes,
        rates: Rates,
        nodes: tuple[int, ...],
    ) -> Measurement:
        path = self._folder / f"{_key(lowered, known, rates, nodes)}.json"
        measurement = None
        with contextlib.suppress(OSError, ValueError):  # missing or corrupt
            measurement = _MEASUREMENT.validate_json(path.read_text())
            os.utime(path)
        if measurement is not None:
            self.hits += 1
            compile = dataclasses.replace(measurement.compile, seconds=0.0)
            return dataclasses.replace(measurement, compile=compile)
        self.misses += 1
        measurement = self._measured(lowered, known, rates, nodes)
        self._keep(path, _MEASUREMENT.dump_json(measurement).decode())
        return measurement

    def _keep(self, path: Path, text: str) -> None:
        """Writes a file atomically; ignores a folder that cannot be written."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                file.write(text)
            os.replace(file.name, path)
            newest = sorted(self._folder.glob("*.json"), key=lambda entry: -entry.stat().st_mtime)
            for old in newest[KEPT:]:
                old.unlink(missing_ok=True)


def _key(
    lowered: jax.stages.Lowered, known: ParameterShapes, rates: Rates, nodes: tuple[int, ...]
) -> str:
    digest = hashlib.sha256(lowered.as_text().encode())
    package = Path(__file__).parents[1]
    for room in MEASURING:
        for source in sorted((package / room).glob("*.py")):
            digest.update(source.read_bytes())
    flags = [os.environ.get(name) for name in FLAGS]
    speeds = dataclasses.replace(rates, memory=0)  # free memory differs from run to run
    figures = dataclasses.asdict(speeds), sorted(known.params), known.vocabulary, device_kinds()
    options = sorted(compat.compiler_options(lowered).items())
    digest.update(
        repr((options, figures, nodes, flags, [_version(name) for name in VERSIONS])).encode()
    )
    return digest.hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return ""
