"""A config as plain dicts, from JSON, HJSON or a mapping."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hjson

from zerojax.config.errors import ConfigError, shown


class _Object(dict[str, Any]):
    """A JSON object that remembers the names that occur more than once."""

    repeated: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    values = _Object(pairs)
    if len(values) < len(pairs):
        times = Counter(name for name, _ in pairs)
        values.repeated = tuple(name for name, n in times.items() if n > 1)
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON; write a finite one")


def read_file(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON or HJSON file; `repeated` lists its repeated keys.

    Raises:
      ConfigError: No such file, not text, or neither JSON nor HJSON (with line and column).
    """
    source = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        where = f" in {Path.cwd()}" if not Path(path).is_absolute() else ""
        raise ConfigError(f"no such file{where}; check the path", source) from None
    except UnicodeDecodeError:
        raise ConfigError("not a text file; a JSON file in UTF-8 is needed", source) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot be read: {error}", source) from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return _read_hjson(text, error, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a usable JSON file: {error}", source) from None


def _read_hjson(text: str, as_json: json.JSONDecodeError, source: str) -> Any:
    """The value of a text that is not JSON: with comments, say, or trailing commas.

    HJSON comes second, since its reader turns 3.0 into 3 and says less about an error.
    """
    at = f"line {as_json.lineno}, column {as_json.colno}"
    broken = f"not valid JSON at {at}: {as_json.msg}"
    if not text.strip():
        raise ConfigError(f"{broken}; the file is empty", source)
    try:
        return hjson.loads(text, object_pairs_hook=_object)
    except hjson.HjsonDecodeError as error:
        also = f"line {error.lineno}, column {error.colno}"
        if also != at:
            broken += f" (and no HJSON at {also}: {error.msg})"
        raise ConfigError(f"{broken}; mend it there", source) from None
    except (ArithmeticError, LookupError, RecursionError) as error:  # 1e999; an open '''
        raise ConfigError(f"not a usable HJSON file: {error}", source) from None


def source_of(config: Any) -> str:
    """The path of a config's file, for messages; "" where the config is no file."""
    return os.fspath(config) if isinstance(config, str | os.PathLike) else ""


class JsonConfig(NamedTuple):
    """A config before its keys are checked: a deep copy, and a problem for each repeated key."""

    raw: dict[str, Any]
    problems: list[str]


def read_json(config: str | os.PathLike[str] | Mapping[str, Any]) -> JsonConfig:
    """Reads a config.

    Args:
      config: The path of a JSON or HJSON file, or a mapping of the same form.

    Raises:
      ConfigError: Not a JSON file, not an object, or a key that is not a string.
      RecursionError: A mapping within itself.
    """
    source = source_of(config)
    value = read_file(config) if isinstance(config, str | os.PathLike) else config
    if not isinstance(value, Mapping):
        wanted = "an object" if source else "the path of a JSON file, a mapping or a ZeroConfig"
        raise ConfigError(f"expected {wanted}, got {shown(value)}", source)
    try:
        return JsonConfig(plain(value), repeated(value))
    except ConfigError as error:
        raise ConfigError(error.problems, source) from None


def repeated(value: Any, path: str = "") -> list[str]:
    """The problems of a value from `read_file`: one sentence for each repeated key."""
    if not isinstance(value, _Object):
        return []
    problems = [f"{path}{name}: stands there more than once; keep one" for name in value.repeated]
    for name, child in value.items():
        problems += repeated(child, f"{path}{name}.")
    return problems


def plain(value: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """A deep copy in plain dicts.

    Raises:
      ConfigError: A key that is not a string.
    """
    copy: dict[str, Any] = {}
    for name, child in value.items():
        if not isinstance(name, str):
            raise ConfigError(f"{path}{shown(name)}: keys are strings; put it in quotes")
        copy[name] = plain(child, f"{path}{name}.") if isinstance(child, Mapping) else child
    return copy
