"""A section of the JSON as a dataclass."""

from collections.abc import Iterator
from dataclasses import fields
from typing import ClassVar

from zerojax.config.errors import ConfigError, as_text
from zerojax.config.keys import KEYS


class Section:
    """A base class that checks each field of a dataclass by the kind of its key in the table."""

    _section: ClassVar[str]

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.name == "device" and value not in ("cpu", "nvme"):
                problems.append(f'device: expected "cpu" or "nvme", got {as_text(value)}')
                continue
            try:
                value = KEYS[f"{self._section}.{item.name}"].kind.check(value)
            except ConfigError as error:
                problems.append(f"{item.name}: {error}")
            object.__setattr__(self, item.name, value)
        if problems := problems or list(self._contradictions()):
            raise ConfigError(problems)

    def _contradictions(self) -> Iterator[str]:
        yield from ()
