"""Strict reading of a YAML file, which remembers repeated keys."""

import os

import yaml

from zerojax.config.errors import ConfigError
from zerojax.config.text_file import Object, text_of

ENDINGS = (".yaml", ".yml")
"""The file-name extensions of YAML files."""


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
