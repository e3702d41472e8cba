"""The packages and extras that zerojax requires, and their installation status.

The metadata of the installed package lists both, where pip reads them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

NAME = "zerojax"
COMPILERS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu")
"""Compiler packages, listed if installed; jax finds them by itself."""


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
      name: The name for pip.
      version: The installed version, None if not installed.
      wanted: The versions that zerojax accepts, "" for any.
      remedy: The command to run if the package is missing or of another version, else "".
    """

    name: str
    version: str | None
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Extra:
    """One extra of zerojax.

    Attributes:
      name: The name, as in ``pip install -e '.[name]'``.
      installed: Whether all requirements of the extra are met, and at least one is for this Python.
      missing: The requirements that are not met, each with the installed version if there is one;
        or "another Python".
      remedy: The command to run, "" if the extra is installed.
    """

    name: str
    installed: bool
    missing: tuple[str, ...] = ()
    remedy: str = ""


def packages() -> tuple[Package, ...]:
    """Returns zerojax, its requirements, and the installed compilers.

    The requirements are not known if zerojax runs from its folder without being installed.
    """
    found = [Package(NAME, _version(NAME))]
    for requirement in _requirements(NAME):
        remedy = f"pip install '{requirement}'" if any(_unmet(requirement)) else ""
        version, wanted = _version(requirement.name), str(requirement.specifier)
        found.append(Package(requirement.name, version, wanted, remedy))
    versions = ((name, _version(name)) for name in COMPILERS)
    return (*found, *(Package(name, version) for name, version in versions if version))


def extras() -> tuple[Extra, ...]:
    """Returns every extra of zerojax with its unmet requirements; empty if zerojax is not
    installed."""
    if _version(NAME) is None:
        return ()
    found = []
    for name in metadata.metadata(NAME).get_all("Provides-Extra") or ():
        missing = tuple(dict.fromkeys(_unmet(Requirement(f"{NAME}[{name}]"))))
        if not missing and not any(_requirements(NAME, name)):  # none is for this Python
            found.append(Extra(name, False, ("another Python",)))
            continue
        remedy = f"pip install -e '.[{name}]'" if missing else ""
        found.append(Extra(name, not missing, missing, remedy))
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str, extra: str = "") -> Iterator[Requirement]:
    """Yields the requirements of an installed package on this Python, or those an extra adds."""
    if _version(name) is None:
        return
    for requirement in map(Requirement, metadata.requires(name) or ()):
        marker, requirement.marker = requirement.marker, None
        is_unconditional = marker is None or marker.evaluate({"extra": ""})
        is_added = marker is not None and not is_unconditional and marker.evaluate({"extra": extra})
        if is_added if extra else is_unconditional:
            yield requirement


def _unmet(requirement: Requirement) -> Iterator[str]:
    """Yields the requirement if it is not met, and the unmet requirements of its extras."""
    version = _version(requirement.name)
    requirement_text = f"{requirement.name}{requirement.specifier}"
    if version is None:
        yield requirement_text
    elif not requirement.specifier.contains(version, prereleases=True):
        yield f"{requirement_text} (found {version})"
    for extra in sorted(requirement.extras):
        for inner in _requirements(requirement.name, extra):
            yield from _unmet(inner)
