"""Reading of a config into plain dicts, from JSON, HJSON, YAML or a mapping."""

import json
import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hjson
import yaml

from zerojax.config.errors import ConfigError, as_text

ENDINGS = (".yaml", ".yml")
"""The file-name extensions of YAML files."""


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


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an `Object` for each mapping."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Object:
    return Object.of(loader.construct_pairs(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(path: str | os.PathLike[str]) -> object:
    """Returns the value in a YAML file; `repeated` lists its repeated keys.

    Raises:
      ConfigError: The file is missing, is not text, or is not YAML (with line and column).
    """
    source, text = os.fspath(path), text_of(path)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"not valid YAML{position}: {error.problem}; fix it there", source
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"not a usable YAML file: {message}", source) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON; write a finite one")


def read_file(path: str | os.PathLike[str]) -> object:
    """Returns the value in a JSON or HJSON file; `repeated` lists its repeated keys.

    Raises:
      ConfigError: The file is missing, is not text, or is neither JSON nor HJSON (with line and
        column).
    """
    source, text = os.fspath(path), text_of(path)
    try:
        return json.loads(text, object_pairs_hook=Object.of, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return _read_hjson(text, error, source)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a usable JSON file: {error}", source) from None


def _read_hjson(text: str, as_json: json.JSONDecodeError, source: str) -> object:
    """Returns the value of a text that is not JSON, for example with comments or trailing commas.

    HJSON is only the fallback: its reader turns 3.0 into 3 and reports errors less precisely.
    """
    position = f"line {as_json.lineno}, column {as_json.colno}"
    message = f"not valid JSON at {position}: {as_json.msg}"
    if not text.strip():
        raise ConfigError(f"{message}; the file is empty", source)
    try:
        return hjson.loads(text, object_pairs_hook=Object.of)
    except hjson.HjsonDecodeError as error:
        message += f" (and no HJSON at line {error.lineno}, column {error.colno}: {error.msg})"
        raise ConfigError(f"{message}; fix it there", source) from None
    # 1e999; an open '''; more digits than Python reads
    except (ArithmeticError, LookupError, RecursionError, ValueError) as error:
        raise ConfigError(f"not a usable HJSON file: {error}", source) from None


class JsonConfig(NamedTuple):
    """A config before its keys are checked: plain dicts, and a problem for each repeated key."""

    raw: dict[str, Any]
    problems: list[str]


def read_json(config: str | os.PathLike[str] | Mapping[str, object]) -> JsonConfig:
    """Reads a config.

    Args:
      config: The path of a JSON, HJSON or YAML file, or a mapping of the same form.

    Raises:
      ConfigError: The config is not such a file or not an object, or a key is not a string.
      RecursionError: A mapping contains itself.
    """
    source = source_of(config)
    value: object = config
    if isinstance(config, str | os.PathLike):
        value = (read_yaml if source.endswith(ENDINGS) else read_file)(source)
    if not isinstance(value, Mapping):
        wanted = "an object" if source else "the path of a JSON file, a mapping or a ZeroConfig"
        stage = f"; pass a stage as zerojax.zero(stage={value})" * (type(value) is int)
        raise ConfigError(f"expected {wanted}, got {as_text(value)}{stage}", source)
    try:
        raw = plain(value)
        raw.pop("$schema", None)  # it is for editors
        return JsonConfig(raw, repeated(value))
    except ConfigError as error:
        raise ConfigError(error.problems, source) from None


def leaves(
    raw: dict[str, object], keys: Container[str] = (), section: str = ""
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the path of each value in a config that is no object or a key's, and its section.

    Args:
      raw: The config, in plain dicts.
      keys: Dotted paths of keys, whose values may be objects.
      section: The path of `raw`, with a dot behind.
    """
    for name, value in raw.items():
        if "." in name:  # an unknown key, even if its path looks like a known one
            continue
        if isinstance(value, dict) and f"{section}{name}" not in keys:
            yield from leaves(value, keys, f"{section}{name}.")
        else:
            yield f"{section}{name}", raw


def plain(value: Mapping[Any, Any], path: str = "") -> dict[str, Any]:
    """Copies a mapping and the mappings in it to plain dicts; other values are shared.

    Raises:
      ConfigError: A key is not a string.
    """
    copy: dict[str, object] = {}
    for name, child in value.items():
        if not isinstance(name, str):
            raise ConfigError(f"{path}{as_text(name)}: keys are strings; put it in quotes")
        copy[name] = plain(child, f"{path}{name}.") if isinstance(child, Mapping) else child
    return copy
