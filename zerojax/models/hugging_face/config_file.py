"""A folder's `config.json` and `generation_config.json`: reading, checking, writing back."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from zerojax.weights.reader import read_json
from zerojax.weights.saver import CONFIG_FILE, GENERATION_FILE, json_text

Config = TypeVar("Config", bound=Any)
Sizes = Sequence[tuple[str, str, Any]]
"""For each size, a config's name, Hugging Face's name, and the default of transformers."""

_OF_FILES = ("torch_dtype", "dtype", "quantization_config", "auto_map")
"""Keys that describe the tensors and the code of the original folder, and are not written back."""


def kept(values: Mapping[str, Any], without: Collection[str] = ()) -> str:
    """Returns the keys of a `config.json` as text for a config's field `hugging_face`.

    >>> kept({"eos_token_id": 5, "torch_dtype": "float16"})
    '{"config.json": {"eos_token_id": 5}}'
    """
    remaining = {k: v for k, v in values.items() if k not in (*_OF_FILES, *without)}
    return json.dumps({CONFIG_FILE: remaining})


def carried(config: Any, file: str = CONFIG_FILE) -> dict[str, Any]:
    """Returns the keys of the file from which a config was read; empty if it was not read."""
    found: dict[str, Any] = json.loads(config.hugging_face or "{}").get(file, {})
    return found


def texts(config: Any, about: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the JSON files in a model's folder, by name.

    Args:
      config: A model's config.
      about: The content of its `config.json`.
    """
    generation = carried(config, GENERATION_FILE)
    extra = {GENERATION_FILE: json_text(generation)} if generation else {}
    return {CONFIG_FILE: json_text(about), **extra}


def read(folder: str | os.PathLike[str], from_hf: Callable[[Mapping[str, Any]], Config]) -> Config:
    """Reads the config from a folder's `config.json`, and keeps its `generation_config.json`.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
      ValueError: A file is not a JSON object, or `from_hf` rejects it.
    """
    file = pathlib.Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there: copy it from the model's page, or write the config by hand"
        )
    try:
        config = from_hf(read_json(file))
        file = file.with_name(GENERATION_FILE)
        if not file.is_file():
            return config
        files = {**json.loads(config.hugging_face), GENERATION_FILE: read_json(file)}
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return dataclasses.replace(config, hugging_face=json.dumps(files))


def check(folder: str | os.PathLike[str], theirs: Any, ours: Any, sizes: Sizes) -> None:
    """Rejects a config unlike the folder's, because no tensor's shape shows the number of heads.

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
    """Rejects values that a model does not support.

    Args:
      values: The values of a `config.json`.
      supported: The values that the model supports, by key.
      module: The name of the model's module, for messages.

    Raises:
      ValueError: A value is not supported.

    >>> check_supported({"hidden_act": "relu"}, {"hidden_act": ["gelu"]}, "zerojax.models.deberta")
    Traceback (most recent call last):
        ...
    ValueError: hidden_act = 'relu' is not supported: zerojax.models.deberta computes 'gelu'
    """
    for key, accepted in supported.items():
        if key in values and values[key] not in accepted:
            raise ValueError(
                f"{key} = {values[key]!r} is not supported: {module} computes "
                f"{' or '.join(map(repr, accepted))}"
            )
