"""The config sections that are objects (destinations of metrics, offload), and functions that read
a section from a keyword and offload from a JSON."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zerojax.config.autotuning import AutotuningConfig
from zerojax.config.errors import ConfigError, as_text, quote_name, suggestion
from zerojax.config.keys import OLD_SWITCHES
from zerojax.config.keys.row import FLAG, ZERO
from zerojax.config.keys.section import Section


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Section):
    """The section `tensorboard` or `csv_monitor`: files of metrics; off if absent.

    Attributes:
      output_path: The folder; "", DeepSpeed's default, is the current folder.
      job_name: A folder within it.

    Example:
      >>> MonitorConfig(output_path="logs")
      MonitorConfig(output_path='logs', job_name='DeepSpeedJobName')
    """

    output_path: str = ""
    job_name: str = "DeepSpeedJobName"

    _section = "tensorboard"  # csv_monitor has the same keys


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """The section `wandb`: a run on wandb; off if absent.

    Attributes:
      group: The name that runs of one group share.
      team: wandb's entity; None for the user's default entity.
      project: The project's name.
    """

    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"

    _section = "wandb"


SWITCHED: dict[str, type[Section]] = {
    "tensorboard": MonitorConfig,
    "csv_monitor": MonitorConfig,
    "wandb": WandbConfig,
    "autotuning": AutotuningConfig,
}
"""The class of each section with the switch `enabled`."""

_NVME_ONLY = ("nvme_path", "buffer_count", "max_in_cpu")
"""Fields that have an effect only with device "nvme"."""


@dataclass(frozen=True, kw_only=True)
class _Offload(Section):
    """The fields of both offload sections."""

    device: Literal["cpu", "nvme"] = "cpu"
    nvme_path: str | None = None

    def _contradictions(self) -> Iterator[str]:
        if self.device == "nvme" and not self.nvme_path:
            yield (
                'nvme_path: device "nvme" needs the folder to write to; '
                'give it, as in "/local_nvme", or set device to "cpu"'
            )

    def idle(self) -> dict[str, str]:
        """Returns the reason for each field that has no effect with the other fields, by name."""
        if self.device == "nvme":
            return {}
        names = (item.name for item in fields(self) if item.name in _NVME_ONLY)
        return dict.fromkeys(names, 'it is for device "nvme", and the device is "cpu"')


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(_Offload):
    """The section `offload_optimizer`: master weights and moments off the accelerator.

    Attributes:
      device: "cpu" (pinned host memory) or "nvme" (files under `nvme_path`).
      nvme_path: A folder on the disk.
      buffer_count: Sub-groups in host memory at a time, with "nvme".
      ratio: The fraction that is offloaded, with "cpu"; the rest stays on the accelerator.
      compute_on: The place of the update, with "cpu": the "device", through which the state
        streams, or the "host"; None for the device, which gives the same bits as without offload.

    Raises:
      ConfigError: A wrong value, or a value that contradicts the device.

    Example:
      >>> OffloadOptimizer(ratio=0.5).device
      'cpu'
    """

    buffer_count: int = 4
    ratio: float = 1.0
    compute_on: Literal["device", "host"] | None = None

    _section = f"{ZERO}.offload_optimizer"

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.ratio == 0:
            yield f'ratio = {as_text(self.ratio)} offloads nothing; set device to "none"'
        elif self.ratio < 1 and self.device == "nvme":
            yield (
                f'ratio = {as_text(self.ratio)} is for device "cpu"; '
                'with "nvme" leave it out or at 1.0'
            )
        if self.compute_on == "host" and self.device == "nvme":
            yield (
                'compute_on = "host" is for device "cpu"; with "nvme" leave it out or at "device"'
            )


@dataclass(frozen=True, kw_only=True)
class OffloadParam(_Offload):
    """The section `offload_param`: parameters off the accelerator, copied in for each use.

    Attributes:
      device: "cpu" (pinned host memory) or "nvme" (files under `nvme_path`).
      nvme_path: A folder on the disk.
      buffer_count: Layers in host memory at a time, with "nvme".
      max_in_cpu: Elements that stay in host memory, with "nvme".

    Raises:
      ConfigError: A wrong value, or a value that contradicts the device.

    Example:
      >>> OffloadParam(device="nvme", nvme_path="/local_nvme").max_in_cpu
      1000000000
    """

    buffer_count: int = 5
    max_in_cpu: int = 1_000_000_000

    _section = f"{ZERO}.offload_param"


OFFLOAD: dict[str, type[OffloadOptimizer] | type[OffloadParam]] = {
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
}
"""The class of each offload section."""


def from_keyword(section: str, given: object) -> Section | None:
    """Returns the config of one section from a keyword, or None if the section is off.

    Args:
      section: A name in `SWITCHED` or `OFFLOAD`.
      given: The config, a mapping of its fields, None, or, for offload, the name of a device.
        The device "none" turns offload off; `enabled` false in the mapping turns off any other
        section.

    Raises:
      ConfigError: An unknown name or a wrong value, prefixed by the section.

    Example:
      >>> from_keyword("offload_param", "cpu").device
      'cpu'
      >>> from_keyword("offload_param", "none") is None
      True
      >>> from_keyword("wandb", {"team": "llm"})
      WandbConfig(group=None, team='llm', project='deepspeed')
      >>> from_keyword("wandb", {"enabled": False}) is None
      True
    """
    is_offload = section in OFFLOAD
    cls: type[Section] = OFFLOAD[section] if is_offload else SWITCHED[section]
    if given is None or isinstance(given, cls):
        return given
    if is_offload and isinstance(given, str):
        given = {"device": given}
    if not isinstance(given, Mapping):
        alternatives = '"cpu", "none" or None' if is_offload else "or None"
        wanted = f"{cls.__name__}, a mapping of its fields, {alternatives}"
        raise ConfigError(f"{section}: expected {wanted}, got {as_text(given)}")
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    problems = [
        f"{section}.{quote_name(name)}: unknown key; {suggestion(name, known)}"
        for name in map(str, given)
        if name not in known and (is_offload or name != "enabled")
    ]
    values = {name: given[name] for name in known if name in given}
    is_on, config = False, None
    try:
        is_on = FLAG.check(is_offload or given.get("enabled", True))
    except ConfigError as error:
        problems.append(f"{section}.enabled: {error}")
    if is_offload and given.get("device", "cpu") in ("none", None):
        values["device"], is_on = "cpu", False
    try:
        config = cls(**values)
    except ConfigError as error:
        problems += [f"{section}.{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return config if is_on else None


@dataclass
class OffloadRead:
    """The result of `read_offload`.

    Attributes:
      fields: Keywords for `ZeroConfig`.
      paths: The JSON key that decides each section, by section.
      idle: The reason for each key that has no effect.
      unjudged: The paths of sections with a wrong value or a contradiction.
      problems: One sentence for each contradiction.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    unjudged: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def read_offload(
    checked: Mapping[str, object], given: Mapping[str, object], wrong: Set[str]
) -> OffloadRead:
    """Reads both sections from a JSON, also in DeepSpeed's old form, and skips a wrong section.

    Args:
      checked: The valid values of the JSON, by dotted key.
      given: The original values, "auto" included.
      wrong: The keys that are known to be wrong.

    Example:
      >>> read_offload({"zero_optimization.cpu_offload_param": True}, {}, set()).fields
      {'offload_optimizer': None, 'offload_param': OffloadParam(device='cpu', nvme_path=None, \
buffer_count=5, max_in_cpu=1000000000)}
    """
    result = OffloadRead()
    for section, cls in OFFLOAD.items():
        path = f"{ZERO}.{section}"
        if any(f"{key}.".startswith(f"{path}.") for key in wrong):
            result.unjudged.add(path)
            continue
        names = [item.name for item in fields(cls) if item.name != "device"]
        try:
            result.paths[section], device = _device(section, checked, given)
            config = _config(section, device, {n: checked.get(f"{path}.{n}") for n in names})
        except ConfigError as error:
            result.problems += error.problems
            result.unjudged.add(path)
            continue
        result.fields[section] = config
        idle = config.idle() if config else dict.fromkeys(names, "nothing of it is offloaded")
        result.idle |= {f"{path}.{name}": reason for name, reason in idle.items()}
    return result


def _device(section: str, checked: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the key that decides the device of a section, and the device."""
    key = f"{ZERO}.{section}.device"
    device = checked.get(key, "none" if given.get(key) == "auto" else None)
    for old in (f"{ZERO}.{name}" for name in OLD_SWITCHES[section]):
        if (switch := checked.get(old)) is None:
            continue
        implied = "cpu" if switch else "none"
        if device not in (None, implied):
            raise ConfigError(
                f"{old} = {as_text(switch)} says otherwise than {key} = {as_text(device)}; take "
                "it out"
            )
        if device is None:
            key, device = old, implied
    return key, device or "none"


def _config(
    section: str, device: str, values: Mapping[str, object]
) -> OffloadOptimizer | OffloadParam | None:
    if device == "none":
        return None
    try:
        given = {name: value for name, value in values.items() if value is not None}
        return OFFLOAD[section](device=device, **given)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{ZERO}.{section}.{problem}" for problem in error.problems) from None
