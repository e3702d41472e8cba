"""What lies in host memory or on disk, as the sections `offload_optimizer` and `offload_param`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from zerojax.config.errors import ConfigError, shown
from zerojax.config.keys import KEYS
from zerojax.config.unknown import closest, hint, judged, spelled

ZERO = "zero_optimization"
NVME_ONLY = ("nvme_path", "buffer_count", "max_in_cpu")
"""Fields that only device "nvme" reads."""


@dataclass(frozen=True, kw_only=True)
class _Offload:
    """The fields of both sections; each is of the kind that its row in the table has."""

    device: Literal["cpu", "nvme"] = "cpu"
    nvme_path: str | None = None

    _section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        problems = []
        for item in fields(self):
            kind, value = KEYS[f"{ZERO}.{self._section}.{item.name}"].kind, getattr(self, item.name)
            if item.name == "device" and value not in ("cpu", "nvme"):
                problems.append(f'device: expected "cpu" or "nvme", got {shown(value)}')
            elif not kind.accepts(value):
                problems.append(f"{item.name}: expected {kind.says}, got {shown(value)}")
            else:
                object.__setattr__(self, item.name, kind.check(value))
        if problems := problems or list(self._contradictions()):
            raise ConfigError(problems)

    def _contradictions(self) -> Iterator[str]:
        if self.device == "nvme" and not self.nvme_path:
            yield (
                'nvme_path: device "nvme" needs the folder to write to; '
                'give it, as in "/local_nvme", or set device to "cpu"'
            )

    def idle(self) -> dict[str, str]:
        """Fields that do nothing beside the others, each with the reason."""
        if self.device == "nvme":
            return {}
        names = (item.name for item in fields(self) if item.name in NVME_ONLY)
        return dict.fromkeys(names, 'it is for device "nvme", and the device is "cpu"')


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(_Offload):
    """Master weights and moments off the accelerator: `offload_optimizer`.

    Attributes:
      device: "cpu" (pinned host memory) or "nvme" (files under `nvme_path`).
      nvme_path: a folder on the disk.
      buffer_count: sub-groups in host memory at a time, with "nvme".
      ratio: the share that is offloaded; the rest stays on the accelerator. With "cpu".
      compute_on: the update runs on the "device", which the state streams through, or on the
        "host"; None is the device, with the same bits as without offload. With "cpu".

    Raises:
      ConfigError: a wrong value, or one that does not go with the device.

    Example:
      >>> OffloadOptimizer(ratio=0.5).device
      'cpu'
    """

    buffer_count: int = 4
    ratio: float = 1.0
    compute_on: Literal["device", "host"] | None = None

    _section = "offload_optimizer"

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        if self.ratio == 0:
            yield f'ratio = {shown(self.ratio)} offloads nothing; set device to "none"'
        elif self.ratio < 1 and self.device == "nvme":
            yield (
                f'ratio = {shown(self.ratio)} is for device "cpu"; '
                'with "nvme" leave it out or at 1.0'
            )
        if self.compute_on == "host" and self.device == "nvme":
            yield (
                'compute_on = "host" is for device "cpu"; with "nvme" leave it out or at "device"'
            )


@dataclass(frozen=True, kw_only=True)
class OffloadParam(_Offload):
    """Parameters off the accelerator, brought in where they are used: `offload_param`.

    Attributes:
      device: "cpu" (pinned host memory) or "nvme" (files under `nvme_path`).
      nvme_path: a folder on the disk.
      buffer_count: layers in host memory at a time, with "nvme".
      max_in_cpu: elements that stay in host memory, with "nvme".

    Raises:
      ConfigError: a wrong value, or one that does not go with the device.

    Example:
      >>> OffloadParam(device="nvme", nvme_path="/local_nvme").max_in_cpu
      1000000000
    """

    buffer_count: int = 5
    max_in_cpu: int = 1_000_000_000

    _section = "offload_param"


OFFLOAD: dict[str, type[OffloadOptimizer] | type[OffloadParam]] = {
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
}
"""The class of each section."""


def offload(section: str, given: Any) -> OffloadOptimizer | OffloadParam | None:
    """The config of one section from a keyword.

    Args:
      section: a name in `OFFLOAD`.
      given: the config, a mapping of its fields, the name of a device, or None.

    Raises:
      ConfigError: an unknown name or a wrong value, with the section before it.

    Example:
      >>> offload("offload_param", "cpu").device
      'cpu'
      >>> offload("offload_param", "none") is None
      True
    """
    cls = OFFLOAD[section]
    if given is None or isinstance(given, cls):
        return given
    if isinstance(given, str):
        given = {"device": given}
    if not isinstance(given, Mapping):
        wanted = f'{cls.__name__}, a mapping of its fields, "cpu", "none" or None'
        raise ConfigError(f"{section}: expected {wanted}, got {shown(given)}")
    known = [item.name for item in fields(cls)]
    unknown = [str(name) for name in given if name not in known]
    problems = judged(unknown, lambda name: _unknown(section, name, known))
    off = given.get("device", "cpu") in ("none", None)
    made = None
    try:
        values = {name: given[name] for name in known if name in given}
        made = cls(**(values | {"device": "cpu"} if off else values))
    except ConfigError as error:
        problems += [f"{section}.{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return None if off else made


def _unknown(section: str, name: str, known: list[str]) -> str:
    likely = hint(name, closest(name, known), f"known: {', '.join(known)}")
    return f"{section}.{spelled(name)}: unknown key; {likely}"
