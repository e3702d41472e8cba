"""`load`: from the JSON to the frozen config, strict, with every problem reported at once."""

import os
from collections.abc import Mapping
from typing import Any

from zerojax.config.errors import ConfigError, shown
from zerojax.config.frozen import ZeroConfig
from zerojax.config.read import plain, read_file, repeated
from zerojax.config.reading import Reading


def load(
    config: str | os.PathLike[str] | Mapping[str, Any] | ZeroConfig,
    auto: Mapping[str, Any] | None = None,
) -> ZeroConfig:
    """Reads a DeepSpeed config.

    DeepSpeed's defaults hold for what is left out, `gradient_clipping` 1.0 among them and, with
    bf16, `check_grad_overflow`; those that change numbers are in `notes`, beside one note for each
    key given. Each "auto" is resolved or
    refused. A `ZeroConfig` is returned as it is.

    Args:
      config: the path of a JSON or HJSON file, a mapping of the same form, or a `ZeroConfig`.
      auto: what stands in for an "auto" of the config, by dotted key, such as
        `{"scheduler.params.total_num_steps": 300}`; a key that is not "auto" there is an error.

    Raises:
      ConfigError: with one line for each problem: the key, the value, the remedy.

    Example:
      >>> load({"zero_optimization": {"stage": 2}}).gradient_clipping
      1.0
      >>> load({"gradient_clipping": "auto"}, auto={"gradient_clipping": 0.5}).gradient_clipping
      0.5
    """
    if isinstance(config, ZeroConfig):
        if auto:
            raise ConfigError('auto: nothing is "auto" in a ZeroConfig; set its fields')
        return config
    reading = read(config, auto)
    source = os.fspath(config) if isinstance(config, str | os.PathLike) else ""
    if reading.problems:
        raise ConfigError(reading.problems, source)
    return ZeroConfig(**reading.fields, notes=tuple(reading.notes))


def read(
    config: str | os.PathLike[str] | Mapping[str, Any], auto: Mapping[str, Any] | None = None
) -> Reading:
    """The reading of a config, with all that is wrong in it, to be looked at.

    Args:
      config: the path of a JSON or HJSON file, or a mapping of the same form.
      auto: as for `load`.

    Raises:
      ConfigError: not a JSON file, not an object, or one that JSON cannot hold.
    """
    source, raw = "", config
    if isinstance(config, str | os.PathLike):
        source, raw = os.fspath(config), read_file(config)
    if not isinstance(raw, Mapping):
        wanted = "an object" if source else "the path of a JSON file, a mapping or a ZeroConfig"
        raise ConfigError(f"expected {wanted}, got {shown(raw)}", source)
    try:
        reading = Reading(plain(raw), auto)
    except RecursionError:
        deep = "nested too deeply, or within itself; it has three levels at most"
        raise ConfigError(deep, source) from None
    except ConfigError as error:
        raise ConfigError(error.problems, source) from None
    reading.problems[:0] = repeated(raw)
    return reading
