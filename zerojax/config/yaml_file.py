"""A YAML file, read strictly: a key that is given twice is remembered."""

import os
from typing import Any

import yaml

from zerojax.config.errors import ConfigError
from zerojax.config.text_file import Object, text_of

ENDINGS = (".yaml", ".yml")
"""The ends of the names of YAML files."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with an `Object` for each mapping."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Object:
    return Object.of(loader.construct_pairs(node, deep=True))


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The value in a YAML file; `repeated` lists its repeated keys.

    Raises:
      ConfigError: No such file, not text, or not YAML (with line and column).
    """
    source, text = os.fspath(path), text_of(path)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"not valid YAML{at}: {error.problem}; mend it there", source) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        words = " ".join(str(error).split())
        raise ConfigError(f"not a usable YAML file: {words}", source) from None
