"""A folder's `config.json` and `generation_config.json`: keys as data, reading, writing back."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from zerojax.models.config import Fields, ModelConfig
from zerojax.weights.reader import read_json
from zerojax.weights.saver import CONFIG_FILE, GENERATION_FILE, json_text

Json = dict[str, Any]
"""The content of a JSON file."""

Config = TypeVar("Config", bound=ModelConfig)

Keys = Sequence[tuple[str, str, object]]
"""For each field of a config: its name, Hugging Face's key, and transformers' default."""

Supported = Mapping[str, Sequence[object]]
"""The values that a model supports, by key; the first of each is transformers' default."""

_OF_FILES = ("torch_dtype", "dtype", "quantization_config", "auto_map")
"""Keys that describe the tensors and the code of the original folder, and are not written back."""

_FOLDER = "folder"  # the key of the path, beside the names of files


def same_keys(config: type[ModelConfig], defaults: Fields) -> Keys:
    """Returns the keys of a config whose fields have Hugging Face's names.

    Args:
      config: The config's type; the fields of `ModelConfig` have no keys.
      defaults: transformers' defaults that differ from those of `config`.
    """
    ours = {field.name for field in dataclasses.fields(ModelConfig)}
    return [
        (field.name, field.name, defaults.get(field.name, field.default))
        for field in dataclasses.fields(config)
        if field.name not in ours
    ]


def from_keys(keys: Keys, values: Json) -> Fields:
    """Returns the fields of a config from the values of a `config.json`."""
    return {field: values.get(key, default) for field, key, default in keys}


def to_keys(keys: Keys, config: ModelConfig) -> Json:
    """Returns the values for a `config.json` from a config."""
    return {key: getattr(config, field) for field, key, _ in keys}


def check_supported(values: Json, supported: Supported, module: str) -> None:
    """Rejects values of a `config.json` that a model does not support.

    Args:
      values: The values of the file.
      supported: The values that the model supports.
      module: The name of the model's module, for messages.

    Raises:
      ValueError: A value is not supported.

    >>> check_supported({"hidden_act": "relu"}, {"hidden_act": ["gelu"]}, "zerojax.models.deberta")
    Traceback (most recent call last):
        ...
    ValueError: hidden_act = 'relu' is not supported: zerojax.models.deberta supports 'gelu'
    """
    for key, accepted in supported.items():
        if key in values and values[key] not in accepted:
            raise ValueError(
                f"{key} = {values[key]!r} is not supported: {module} supports "
                f"{' or '.join(map(repr, accepted))}"
            )


def kept(values: Json, without: Collection[str] = ()) -> str:
    """Returns the keys of a `config.json` as text for a config's field `hugging_face`.

    >>> kept({"eos_token_id": 5, "torch_dtype": "float16"})
    '{"config.json": {"eos_token_id": 5}}'
    """
    remaining = {k: v for k, v in values.items() if k not in (*_OF_FILES, *without)}
    return json.dumps({CONFIG_FILE: remaining})


def carried(config: object, file: str = CONFIG_FILE) -> Json:
    """Returns the keys of the file from which a config was read; empty if it was not read."""
    found: Json = json.loads(getattr(config, "hugging_face", "") or "{}").get(file, {})
    return found


def source_folder(config: object) -> pathlib.Path | None:
    """Returns the folder from which a config was read; None if it was not read."""
    found = json.loads(getattr(config, "hugging_face", "") or "{}").get(_FOLDER)
    return None if found is None else pathlib.Path(found)


def labels(values: Json) -> int:
    """Returns the number of labels that a `config.json` states, as transformers counts them."""
    return values.get("num_labels") or len(values.get("id2label") or (0, 1))


def with_labels(values: Json, count: int | None) -> Json:
    """Returns a `config.json` with that many labels, whose names it keeps if they are as many.

    >>> with_labels({"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}, 3)
    {'num_labels': 3}
    """
    if count in (None, len(values.get("id2label") or ())):
        return values
    return {k: x for k, x in values.items() if k not in ("id2label", "label2id")} | {
        "num_labels": count
    }


def texts(config: ModelConfig, about: Json) -> dict[str, str]:
    """Returns the texts of the JSON files in a model's folder, by name.

    Args:
      config: A model's config.
      about: The content of its `config.json`.
    """
    generation = carried(config, GENERATION_FILE)
    extra = {GENERATION_FILE: json_text(generation)} if generation else {}
    return {CONFIG_FILE: json_text(about), **extra}


def in_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a folder's `config.json`.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
    """
    file = pathlib.Path(folder) / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: copy it from the model's page")
    return file


def read(folder: str | os.PathLike[str], from_hf: Callable[[Json], Config]) -> Config:
    """Reads the config from a folder's `config.json`.

    The config keeps the folder's `generation_config.json` and path, see `texts` and
    `source_folder`.

    Raises:
      FileNotFoundError: The folder has no `config.json`.
      ValueError: A file is not a JSON object, or `from_hf` rejects it.
    """
    file = in_folder(folder)
    try:
        config = from_hf(read_json(file))
        files = {**json.loads(config.hugging_face), _FOLDER: str(file.parent.absolute())}
        file = file.with_name(GENERATION_FILE)
        if file.is_file():
            files[GENERATION_FILE] = read_json(file)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    return dataclasses.replace(config, hugging_face=json.dumps(files))
