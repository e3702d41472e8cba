"""The packages and extras that zerojax asks for, and what of them is installed.

Both stand in the metadata of the installed package, where pip reads them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

NAME = "zerojax"
COMPILERS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda13-pjrt", "libtpu")
"""Listed where they are installed; jax finds them by itself."""


@dataclass(frozen=True)
class Package:
    """One package.

    Attributes:
      name: As pip knows the package.
      version: The installed version, None where none is installed.
      wanted: The versions that zerojax takes, "" for any.
      remedy: The command to run where the package is missing or of another version, else "".
    """

    name: str
    version: str | None
    wanted: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Extra:
    """One extra of zerojax.

    Attributes:
      name: As in ``pip install -e '.[name]'``.
      installed: Whether all that the extra asks for is installed.
      missing: The requirements that are not met, with the version found where one is installed.
      remedy: The command to run, "" where the extra is installed.
    """

    name: str
    installed: bool
    missing: tuple[str, ...] = ()
    remedy: str = ""


def packages() -> tuple[Package, ...]:
    """zerojax, its requirements, and the compilers that are installed.

    Where zerojax runs from its folder, without being installed, its requirements are not known.
    """
    found = [Package(NAME, _version(NAME))]
    for requirement in _requirements(NAME):
        remedy = f"pip install '{requirement}'" if any(_unmet(requirement)) else ""
        version, wanted = _version(requirement.name), str(requirement.specifier)
        found.append(Package(requirement.name, version, wanted, remedy))
    versions = ((name, _version(name)) for name in COMPILERS)
    return (*found, *(Package(name, version) for name, version in versions if version))


def extras() -> tuple[Extra, ...]:
    """Every extra of zerojax, and what is missing of each; none where zerojax is not installed."""
    if _version(NAME) is None:
        return ()
    found = []
    for name in metadata.metadata(NAME).get_all("Provides-Extra") or ():
        missing = tuple(dict.fromkeys(_unmet(Requirement(f"{NAME}[{name}]"))))
        remedy = f"pip install -e '.[{name}]'" if missing else ""
        found.append(Extra(name, not missing, missing, remedy))
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str, extra: str = "") -> Iterator[Requirement]:
    """What an installed package requires on this Python, or what one of its extras adds."""
    if _version(name) is None:
        return
    for requirement in map(Requirement, metadata.requires(name) or ()):
        marker, requirement.marker = requirement.marker, None
        always = marker is None or marker.evaluate({"extra": ""})
        added = marker is not None and not always and marker.evaluate({"extra": extra})
        if added if extra else always:
            yield requirement


def _unmet(requirement: Requirement) -> Iterator[str]:
    """The requirement itself, if it is not met, and what is missing of the extras it names."""
    version = _version(requirement.name)
    plain = f"{requirement.name}{requirement.specifier}"
    if version is None:
        yield plain
    elif not requirement.specifier.contains(version, prereleases=True):
        yield f"{plain} (found {version})"
    for extra in sorted(requirement.extras):
        for inner in _requirements(requirement.name, extra):
            yield from _unmet(inner)
