"""The sections of offload as a JSON has them, in DeepSpeed's old form too."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from zerojax.config.errors import ConfigError, shown
from zerojax.config.offload import OFFLOAD, ZERO, OffloadOptimizer, OffloadParam

OLD_SWITCHES = {
    "offload_optimizer": ("cpu_offload",),
    "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}
"""What once said `{"device": "cpu"}`, by section."""


@dataclass
class OffloadRead:
    """What the sections say.

    Attributes:
      fields: for `ZeroConfig`.
      paths: the key that decides each of them.
      idle: keys that do nothing, each with the reason.
      unjudged: sections with something wrong in them.
      problems: values that do not go together.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unjudged: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def read_offload(
    sound: Mapping[str, Any], given: Mapping[str, Any], wrong: Set[str]
) -> OffloadRead:
    """Reads both sections; one with something wrong in it is left alone.

    Args:
      sound: the values of the JSON by dotted key, each of its kind.
      given: the values as they stand there, "auto" too.
      wrong: keys that are known to be wrong.

    Example:
      >>> read_offload({"zero_optimization.cpu_offload_param": True}, {}, set()).fields
      {'offload_optimizer': None, 'offload_param': OffloadParam(device='cpu', nvme_path=None, \
buffer_count=5, max_in_cpu=1000000000)}
    """
    read = OffloadRead()
    for section, cls in OFFLOAD.items():
        path = f"{ZERO}.{section}"
        if any(f"{key}.".startswith(f"{path}.") for key in wrong):
            read.unjudged.add(path)
            continue
        names = [item.name for item in fields(cls) if item.name != "device"]
        try:
            read.paths[section], device = _device(section, sound, given)
            made = _made(section, device, {n: sound.get(f"{path}.{n}") for n in names})
        except ConfigError as error:
            read.problems += error.problems
            read.unjudged.add(path)
            continue
        read.fields[section] = made
        idle = made.idle() if made else dict.fromkeys(names, "nothing of it is offloaded")
        read.idle |= {f"{path}.{name}": reason for name, reason in idle.items()}
    return read


def _device(section: str, sound: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, str]:
    """The device of a section, and the key that names it."""
    by = f"{ZERO}.{section}.device"
    device = sound.get(by, "none" if given.get(by) == "auto" else None)
    for old in (f"{ZERO}.{name}" for name in OLD_SWITCHES[section]):
        if (switch := sound.get(old)) is None:
            continue
        means = "cpu" if switch else "none"
        if device not in (None, means):
            raise ConfigError(
                f"{old} = {shown(switch)} says otherwise than {by} = {shown(device)}; take it out"
            )
        if device is None:
            by, device = old, means
    return by, device or "none"


def _made(
    section: str, device: str, values: Mapping[str, Any]
) -> OffloadOptimizer | OffloadParam | None:
    if device == "none":
        return None
    try:
        set_ = {name: value for name, value in values.items() if value is not None}
        return OFFLOAD[section](device=device, **set_)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{ZERO}.{section}.{problem}" for problem in error.problems) from None
