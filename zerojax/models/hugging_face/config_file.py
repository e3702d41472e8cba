"""A folder's `config.json` and `generation_config.json`: keys as data, reading, writing back."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from zerojax.models.config import Fields, ModelConfig
from zerojax.weights.reader import read_json
from zerojax.weights.saver import CONFIG_FILE, GENERATION_FILE

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


def kept(values: Json) -> str:
    """Returns the keys of a `config.json` as text for a config's field `hugging_face`.

    >>> kept({"eos_token_id": 5, "torch_dtype": "float16"})
    '{"config.json": {"eos_token_id": 5}}'
    """
    return json.dumps({CONFIG_FILE: {k: v for k, v in values.items() if k not in _OF_FILES}})


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
    values = {k: x for k, x in values.items() if k != "num_labels"}
    if count in (None, len(values.get("id2label") or ())):
        return values
    return {k: x for k, x in values.items() if k not in ("id2label", "label2id")} | {
        "num_labels": count
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFormat(Generic[Config]):
    """The `config.json` of some model types: rows of keys, and functions for what is no row.

    Attributes:
      config: The type of the config.
      architectures: The class of transformers, by model type.
      kinds: transformers' defaults that differ from those of `keys`, by key, for each model type;
        the first type is that of a file that names none.
      keys: The fields that have a key of their own.
      supported: The values that the model supports, by key.
      read: Returns the other fields from the values, with the defaults of their type, and from the
        fields of `keys`.
      write: Returns the other keys from a config and from the keys that it carries.
      has_labels: Whether the model has a head for the labels of the file.
    """

    config: type[Config]
    architectures: Mapping[str, str]
    kinds: Mapping[str, Json]
    keys: Keys
    supported: Supported
    read: Callable[[Json, Fields], Fields] = lambda values, fields: {}
    write: Callable[[Config, Json], Json] = lambda config, about: {}
    has_labels: bool = False

    def from_hf(self, values: Json) -> Config:
        """Converts a `config.json`; `to_hf` writes its other keys back.

        Raises:
          ValueError: The model does not support a value.
        """
        supported = {"model_type": [*self.kinds], **self.supported}
        check_supported(values, supported, self.config.__module__)
        values = self.kinds[values.get("model_type", self._first)] | values
        fields: Fields = {field: values.get(key, default) for field, key, default in self.keys}
        if self.has_labels:
            fields["num_labels"] = labels(values)
        fields |= self.read(values, fields)
        return self.config(**fields, hugging_face=kept(values))

    def to_hf(self, config: Config) -> Json:
        """Returns the `config.json` for transformers, with the other keys of the original file.

        `scan`, `remat`, `dtype` and the numbers of chunks are omitted.

        Raises:
          ValueError: The config has an option that the model type has not.
        """
        about = with_labels(carried(config), getattr(config, "num_labels", None))
        kind = getattr(config, "model_type", self._first)
        values = {
            **{key: x[0] for key, x in self.supported.items() if x[0] is not None},
            **about,
            "model_type": kind,
            "architectures": [self.architectures[kind]],
            **{key: getattr(config, field) for field, key, _ in self.keys},
            **self.write(config, about),
        }
        for name, ours, theirs in differences(config, self.from_hf(values)):
            raise ValueError(
                f"transformers' {kind!r} has {name} = {theirs!r}, not {ours!r}: set another "
                "model_type in the config"
            )
        return values

    @property
    def _first(self) -> str:
        return next(iter(self.kinds))


_FREE = (
    *("scan", "remat", "dtype", "hugging_face", "mlp_chunks", "loss_chunks", "num_labels"),
    *("dropout", "pad_token_id"),
)
"""Fields in which a model may differ from the one that a folder describes."""


def differences(ours: Config, theirs: Config) -> Iterator[tuple[str, object, object]]:
    """Yields the name and both values of the fields in which two models differ."""
    for field in dataclasses.fields(ours):
        name = ours.computed.get(field.name, field.name)
        values = getattr(ours, name), getattr(theirs, name)
        if field.name not in _FREE and values[0] != values[1]:
            yield field.name, *values


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

    The config keeps the folder's `generation_config.json` and path, see `source_folder`.

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
