"""What is installed of what zerojax asks for: its requirements, and its extras.

Both are read where pip reads them: in the metadata of the installed package, or in the
``pyproject.toml`` beside it where it is run from its folder.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "zerojax"
CORE = ""
"""The key of what is needed without any extra."""

COMPILERS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu")
"""Told of where they are installed; jax finds them by itself."""


class Found(NamedTuple):
    """An installed package: its version and its own requirements."""

    version: str
    requires: tuple[str, ...] = ()


Look = Callable[[str], Found | None]
"""From the name of a package to what is installed, None where nothing is."""


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
      name: as pip knows it.
      version: the one that is installed, None where there is none.
      wanted: the versions that zerojax takes, "" for any.
      remedy: what to run where it is missing or does not fit, else "".
    """

    name: str
    version: str | None
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Extra:
    """One extra of zerojax.

    Attributes:
      name: as in ``zerojax[name]``.
      installed: everything that it asks for is there.
      missing: what is not, with the version that is there where it does not fit.
      remedy: what to run, "" where it is installed.
    """

    name: str
    installed: bool
    missing: tuple[str, ...] = ()
    remedy: str = ""


def look(name: str) -> Found | None:
    """What is installed under a name, by the metadata of this Python."""
    try:
        there = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Found(there.version, tuple(there.requires or ()))


def declared() -> dict[str, list[Requirement]]:
    """What zerojax asks for on this Python, by extra; ``CORE`` is asked for in any case.

    Empty where neither metadata nor a ``pyproject.toml`` is there.

    Example:
      >>> sorted(str(r) for r in declared()["export"])
      ['safetensors>=0.8']
    """
    try:
        metadata = importlib.metadata.metadata(NAME)
    except importlib.metadata.PackageNotFoundError:
        return _declared_in(Path(__file__).parents[2] / "pyproject.toml")
    requires = metadata.get_all("Requires-Dist") or []
    names = metadata.get_all("Provides-Extra") or []
    return {extra: [*_only(requires, extra)] for extra in (CORE, *names)}


def _declared_in(path: Path) -> dict[str, list[Requirement]]:
    if not path.exists():
        return {}
    project = tomllib.loads(path.read_text()).get("project", {})
    if project.get("name") != NAME:
        return {}
    lists = {CORE: project.get("dependencies", []), **project.get("optional-dependencies", {})}
    return {extra: [*_only(asked, CORE)] for extra, asked in lists.items()}


def _only(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    """The requirements that an extra adds on this Python; those in any case for ``CORE``."""
    for requirement in map(Requirement, requires):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": CORE})
        added = marker is not None and not always and marker.evaluate({"extra": extra})
        if always if extra == CORE else added:
            requirement.marker = None
            yield requirement


def packages(
    asked: Mapping[str, Iterable[Requirement]] | None = None, look: Look = look
) -> tuple[Package, ...]:
    """zerojax, what it needs in any case, and the compilers that are there.

    Args:
      asked: requirements by extra; :func:`declared` by default.
      look: finds an installed package.

    Example:
      >>> old = packages({"": [Requirement("jax>=0.10.2")]}, {"jax": Found("0.9")}.get)
      >>> [(package.version, package.remedy) for package in old if package.name == "jax"]
      [('0.9', "pip install 'jax>=0.10.2'")]
    """
    asked = declared() if asked is None else asked
    own = look(NAME)
    found = [Package(NAME, own.version if own else None)]
    for requirement in asked.get(CORE, ()):
        there = look(requirement.name)
        remedy = f"pip install '{requirement}'" if [*_unmet(requirement, asked, look)] else ""
        wanted = str(requirement.specifier)
        found.append(Package(requirement.name, there.version if there else None, wanted, remedy))
        if requirement.name == "jax":
            jaxlib = look("jaxlib")
            found.append(Package("jaxlib", jaxlib.version if jaxlib else None))
    there_too = ((name, look(name)) for name in COMPILERS)
    return (*found, *(Package(name, there.version) for name, there in there_too if there))


def extras(
    asked: Mapping[str, Iterable[Requirement]] | None = None, look: Look = look
) -> tuple[Extra, ...]:
    """Every extra of zerojax, and what is missing of it.

    Args:
      asked: requirements by extra; :func:`declared` by default.
      look: finds an installed package.

    Example:
      >>> asked = {"monitor": [Requirement("tensorboard>=2.16")]}
      >>> extras(asked, lambda name: None)[0].remedy
      "pip install 'zerojax[monitor]'"
    """
    asked = declared() if asked is None else asked
    found = []
    for extra, requirements in asked.items():
        if extra == CORE:
            continue
        missing = tuple(dict.fromkeys(m for r in requirements for m in _unmet(r, asked, look)))
        remedy = f"pip install '{NAME}[{extra}]'" if missing else ""
        found.append(Extra(extra, not missing, missing, remedy))
    return tuple(found)


def _unmet(
    requirement: Requirement, asked: Mapping[str, Iterable[Requirement]], look: Look
) -> Iterator[str]:
    """What is missing for a requirement, and for the extras that it names."""
    plain = f"{requirement.name}{requirement.specifier}"
    if canonicalize_name(requirement.name) == NAME:  # an extra that includes another one
        for extra in sorted(requirement.extras):
            for inner in asked.get(extra, ()):
                yield from _unmet(inner, asked, look)
        return
    there = look(requirement.name)
    if there is None:
        yield plain
        return
    if not requirement.specifier.contains(there.version, prereleases=True):
        yield f"{plain} (found {there.version})"
    for extra in sorted(requirement.extras):
        for inner in _only(there.requires, extra):
            yield from _unmet(inner, asked, look)
