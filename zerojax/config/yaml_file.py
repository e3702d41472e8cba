"""Strict reading of a YAML file, which remembers repeated keys."""

import math
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


_MOST = 100_000
"""The most values in a file; the values of an alias count at every use."""


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Returns the number of values in a node; infinite for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]


def read_yaml(path: str | os.PathLike[str]) -> object:
    """Returns the value in a YAML file; `repeated` lists its repeated keys.

    Raises:
      ConfigError: The file is missing, is not text, is not YAML (with line and column), or its
        aliases expand to more than 100,000 values.
    """
    source, text = os.fspath(path), text_of(path)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST:
            raise ValueError(
                f"its aliases (*name) stand for more than {_MOST:,} values, or for themselves; "
                "write the values out"
            )
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(
            f"not valid YAML{position}: {error.problem}; mend it there", source
        ) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(f"not a usable YAML file: {message}", source) from None
