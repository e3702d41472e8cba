"""Hugging Face's `config.json` for configs whose fields have the same names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

OURS = ("scan", "remat", "dtype", "hugging_face")  # fields that no config.json has


def check_supported(
    values: Mapping[str, Any], supported: Mapping[str, Sequence[Any]], module: str
) -> None:
    """Rejects values that the module does not support.

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


def of_fields(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values that are fields of a config type and may be in a `config.json`."""
    names = {field.name for field in dataclasses.fields(config)} - set(OURS)
    return {name: value for name, value in values.items() if name in names}
