"""A folder's `config.json`, and what it must agree with."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from zerojax.weights.reader import read_json
from zerojax.weights.saver import CONFIG_FILE

Config = TypeVar("Config")
Sizes = Sequence[tuple[str, str, Any]]
"""A config's name, Hugging Face's, and the default of transformers."""


def read(folder: str | os.PathLike[str], from_hf: Callable[[Mapping[str, Any]], Config]) -> Config:
    """The config that a folder's `config.json` describes.

    Raises:
      FileNotFoundError: The folder has none.
      ValueError: The file is no JSON object, or `from_hf` refuses it.
    """
    file = pathlib.Path(folder) / CONFIG_FILE
    if not file.exists():
        raise FileNotFoundError(
            f"{file} is not there: copy it from the model's page, or write the config by hand"
        )
    try:
        return from_hf(read_json(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def check(folder: str | os.PathLike[str], theirs: Any, ours: Any, sizes: Sizes) -> None:
    """Refuse a config other than the folder's: no tensor's shape shows the number of heads.

    Raises:
      ValueError: A size differs.
    """
    for name, key, _ in sizes:
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"{pathlib.Path(folder) / CONFIG_FILE}: {key} = {getattr(theirs, name)}, but the "
                f"model has {name} = {getattr(ours, name)}: build it from read_config(folder)"
            )


def check_supported(
    values: Mapping[str, Any], supported: Mapping[str, Sequence[Any]], module: str
) -> None:
    """Refuse values that a model does not compute.

    Args:
      values: Of a `config.json`.
      supported: The values that the model computes, by key.
      module: The model's, for messages.

    Raises:
      ValueError: A value is not among the supported ones.
    """
    for key, able in supported.items():
        if key in values and values[key] not in able:
            raise ValueError(
                f"{key} = {values[key]!r} is not supported: {module} computes "
                f"{' or '.join(map(repr, able))}"
            )
