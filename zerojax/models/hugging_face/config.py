"""Hugging Face's `config.json` for configs whose fields have the same names."""

import dataclasses
from collections.abc import Mapping
from typing import Any

OURS = ("scan", "remat", "dtype", "hugging_face")  # fields that no config.json has


def of_fields(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Selects the values that are fields of a config type and may be in a `config.json`."""
    names = {field.name for field in dataclasses.fields(config)} - set(OURS)
    return {name: value for name, value in values.items() if name in names}
