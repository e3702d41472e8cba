"""Measurements of compiled programs, kept on disk."""

from __future__ import annotations

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
from zerojax.foresight.costs import Measurement, measure
from zerojax.xla import compat

VERSIONS = ("zerojax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
MEASURING = ("hlo", "foresight", "devices", "xla")
"""The rooms whose code decides what is measured; a change there makes old measurements void."""
_MEASUREMENT = pydantic.TypeAdapter(Measurement)
KEPT = 2000
"""How many measurements are kept; those not used for the longest go first."""


class Cache:
    """A :data:`zerojax.foresight.costs.Measure` that measures each program once on this machine.

    A program is known by its lowered text, which holds the number of devices, by their figures, by
    the options of the compiler, and by the versions of the compiler and of zerojax. A remembered
    measurement has 0 compile seconds.

    Args:
      folder: Where they are kept; None for ``zerojax/plans`` in ``$XDG_CACHE_HOME`` or
        ``~/.cache``.

    Attributes:
      hits: How many programs were remembered.
      misses: How many programs were compiled.
    """

    def __init__(self, folder: Path | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._folder = base / "zerojax" / "plans" if folder is None else folder
        self.hits = self.misses = 0

    def __call__(
        self,
        lowered: jax.stages.Lowered,
        known: ParameterShapes,
        rates: Rates,
        nodes: tuple[int, ...],
    ) -> Measurement:
        path = self._folder / f"{_key(lowered, known, rates, nodes)}.json"
        measurement = self._remembered(path)
        if measurement is not None:
            self.hits += 1
            return dataclasses.replace(measurement, compile_seconds=0.0)
        self.misses += 1
        measurement = measure(lowered, known, rates, nodes)
        text = _MEASUREMENT.dump_json(measurement).decode()
        self._keep(path, f"{_digest(text)}\n{text}\n")
        return measurement

    def _remembered(self, path: Path) -> Measurement | None:
        """The measurement in a file; None where the file is absent, or not as it was written."""
        try:
            digest, text = path.read_text().splitlines()
            measurement = _MEASUREMENT.validate_json(text)
            os.utime(path)
        except (OSError, ValueError):  # pydantic's ValidationError is one
            return None
        return measurement if digest == _digest(text) else None

    def _keep(self, path: Path, text: str) -> None:
        """Write a file whole or not at all; a folder that cannot be written is no error."""
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
