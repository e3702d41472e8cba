"""What a training loop knows of a config's "auto": the length of the run, and the rates of options.

Example::

    filled(path, {"optimizer.params.lr": 1e-3, "scheduler.params.total_num_steps": 300})
    # {"scheduler.params.total_num_steps": 300}, where the file has "auto" there alone
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import hjson
import yaml


def filled(
    config: pathlib.Path,
    values: Mapping[str, Any],
    given: Mapping[str, tuple[str, Any]] | None = None,
) -> dict[str, Any]:
    """The values of the keys that are "auto" in a config, by their dotted names.

    Args:
      config: A DeepSpeed JSON or Accelerate's YAML.
      values: What the loop says for each key.
      given: By key an option of the command and its value, None where the user left it out.

    Raises:
      ValueError: An option was given, and the config has a value of its own.
    """
    there = dict(_flat(_settings(config)))
    for key, (option, value) in (given or {}).items():
        known = value is None or "optimizer.type" not in there
        if not known and there.get(key) not in ("auto", value):
            says = f"has {key} = {there[key]}" if key in there else f"has no {key}"
            raise ValueError(
                f"--{option} {value}, but {config} {says}: leave the option out, "
                'or write "auto" there'
            )
    return {key: value for key, value in values.items() if there.get(key) == "auto"}


def _settings(config: pathlib.Path) -> Any:
    """What the file says, and the DeepSpeed JSON behind a YAML; {} where it cannot be read, of
    which `zerojax.zero` says more."""
    try:
        if config.suffix not in (".yaml", ".yml"):
            return hjson.loads(config.read_text())
        section = (yaml.safe_load(config.read_text()) or {}).get("deepspeed_config") or {}
        file = section.get("deepspeed_config_file")
        return _settings(config.parent / file) if file else {}
    except (OSError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return {}


def _flat(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(section, Mapping):
        for key, value in section.items():
            yield from _flat(value, f"{path}.{key}" if path else key)
    else:
        yield path, section
