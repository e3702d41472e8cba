"""Reading of a config file as text, and objects that remember repeated keys."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from zerojax.config.errors import ConfigError


class Object(dict[str, Any]):
    """An object of a file that remembers the names that occur more than once."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: list[tuple[str, object]]) -> "Object":
        """Builds an object from names and values; the last value of a repeated name wins."""
        values = cls(pairs)
        if len(values) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            values.repeated = tuple(str(name) for name, n in counts.items() if n > 1)
        return values


def repeated(value: object, path: str = "") -> list[str]:
    """Returns one sentence for each key that an `Object` or a nested one repeats."""
    if not isinstance(value, Object):
        return []
    problems = [f"{path}{name}: is set twice; remove one" for name in value.repeated]
    for name, child in value.items():
        problems += repeated(child, f"{path}{name}.")
    return problems


def source_of(config: object) -> str:
    """Returns the path of a config's file, for messages; "" if the config is not a file."""
    return os.fspath(config) if isinstance(config, str | os.PathLike) else ""


def text_of(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file.

    Raises:
      ConfigError: The path does not exist, cannot be read, or is not UTF-8 text.
    """
    source = os.fspath(path)
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        where = f" in {Path.cwd()}" if not Path(path).is_absolute() else ""
        raise ConfigError(f"no such file{where}; check the path", source) from None
    except UnicodeDecodeError:
        raise ConfigError("not a text file; text in UTF-8 is needed", source) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", source) from None
