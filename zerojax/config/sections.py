"""The sections of a config that are objects of their own: metrics, offload, and the search."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self

from zerojax.config import kinds as k
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.row import ZERO, Key, check_fields, keys_of, setting


class Section:
    """A base class for dataclasses whose fields are the keys of a section, made by `setting`.

    Raises:
      ConfigError: Wrong values, each problem with the name of its field.
    """

    switch: ClassVar[str] = "enabled"
    short: ClassVar[str] = ""  # the other forms of a keyword, in an error

    def __post_init__(self) -> None:
        problems = check_fields(self)[1]
        if problems := problems or list(self.contradictions()):
            raise ConfigError(problems)

    def contradictions(self) -> Iterator[str]:
        """Yields one problem for each contradiction of valid fields."""
        yield from ()

    def idle(self) -> dict[str, str]:
        """Returns the reason for each field that has no effect with the other fields, by name."""
        return {}

    @classmethod
    def in_full(cls, given: object) -> object:
        """Returns the mapping that a short form of a keyword stands for; others unchanged."""
        return given

    @classmethod
    def keys(cls, path: str, why: str) -> Iterator[Key]:
        """Yields the keys of the section at a path; `why` is for the switch."""
        yield Key(f"{path}.enabled", k.FLAG, False, why)
        yield from keys_of(cls, f"{path}.").values()

    @classmethod
    def read(cls, path: str, values: Mapping[str, object]) -> Self | None:
        """Returns the section of a JSON, or None if it is off.

        Args:
          path: The section.
          values: The valid values of the JSON, by dotted key.

        Raises:
          ConfigError: A contradiction.
        """
        if values.get(f"{path}.{cls.switch}") in (None, False, "none"):
            return None
        names = {name: values.get(each.path) for name, each in keys_of(cls, f"{path}.").items()}
        try:
            return cls(**{k: v for k, v in names.items() if v is not None})
        except ConfigError as error:
            raise ConfigError(f"{path}.{problem}" for problem in error.problems) from None


class Place(NamedTuple):
    """The class of a section, its path in the JSON, and the meaning of its switch."""

    cls: type[Section]
    path: str
    why: str


def section(cls: type[Section], path: str, why: str) -> Any:
    """Returns the field of a dataclass that a section of the JSON sets; None if it is off."""
    return field(default=None, metadata={"section": Place(cls, path, why)})


@dataclass(frozen=True, kw_only=True)
class MonitorConfig(Section):
    """The section `tensorboard` or `csv_monitor`: files of metrics; off if absent.

    Example:
      >>> MonitorConfig(output_path="logs")
      MonitorConfig(output_path='logs', job_name='DeepSpeedJobName')
    """

    output_path: str = setting("", k.TEXT, "", "the folder; the current one by default")
    job_name: str = setting("", k.TEXT, "DeepSpeedJobName", "a folder within it")


@dataclass(frozen=True, kw_only=True)
class WandbConfig(Section):
    """The section `wandb`: a run on wandb; off if absent."""

    group: str | None = setting("", k.optional(k.TEXT), None, "the name that runs of a group share")
    team: str | None = setting("", k.optional(k.TEXT), None, "wandb's entity; null is your default")
    project: str = setting("", k.TEXT, "deepspeed", "wandb's project")


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Section):
    """The section `fp8`: products of gathered parameters in fp8; off if absent. As a keyword True,
    or "emulate".

    Example:
      >>> Fp8Config(emulate=True).min_size
      4194304
    """

    emulate: bool = setting(
        "", k.FLAG, False, "true: products compute in bfloat16 on rounded operands, on any device"
    )
    min_size: int = setting(
        "", k.SIZE, 2**22, "matrices of fewer elements, each layer's, stay in bfloat16"
    )
    filter_fqns: str = setting(
        "", k.TEXT, "", "torchtitan's key: parts of the paths that stay in bfloat16, with commas"
    )

    short = 'True, "emulate" '

    @classmethod
    def in_full(cls, given: object) -> object:
        """Returns the mapping that True, False or "emulate" stands for."""
        if given == "emulate":
            return {"emulate": True}
        return {"enabled": given} if isinstance(given, bool) else given


@dataclass(frozen=True, kw_only=True)
class AutotuningConfig(Section):
    """The section `autotuning`: the bounds of the search for settings; off if absent.

    Raises:
      ConfigError: A smallest size is above the largest.
    """

    metric: Literal["throughput", "latency", "flops"] = setting(
        "",
        k.choice("throughput", "latency", "flops"),
        "throughput",
        "what fit ranks by: rows a second (as flops does, of one model), or a step's time",
    )
    max_train_batch_size: int | None = setting(
        "", k.optional(k.POSITIVE), None, "the most rows of an update, over all devices"
    )
    min_train_batch_size: int = setting("", k.POSITIVE, 1, "the fewest rows of an update")
    max_train_micro_batch_size_per_gpu: int = setting(
        "", k.POSITIVE, 1024, "the largest micro-batch"
    )
    min_train_micro_batch_size_per_gpu: int = setting("", k.POSITIVE, 1, "the smallest micro-batch")
    num_tuning_micro_batch_sizes: int = setting(
        "", k.POSITIVE, 3, "micro-batches to compile for each stage, remat and offload, at most"
    )

    def contradictions(self) -> Iterator[str]:
        """Yields a problem for each smallest size above the largest."""
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if high is not None and low > high:
                yield f"min_{name} = {low} is above max_{name} = {high}; lower the one"


_NVME_ONLY = ("nvme_path", "buffer_count", "max_in_cpu")
"""Fields that have an effect only with device "nvme"."""


def _buffers(default: int) -> Any:
    return setting("", k.BUFFERS, default, "blocks in host memory at a time, read ahead")


@dataclass(frozen=True, kw_only=True)
class _Offload(Section):
    """The fields of both offload sections."""

    device: Literal["cpu", "nvme"] = setting("", k.choice("cpu", "nvme"), "cpu", "")
    nvme_path: str | None = setting("", k.optional(k.TEXT), None, "the folder of the files")

    switch = "device"
    short = '"cpu", "none" '

    @classmethod
    def in_full(cls, given: object) -> object:
        """Returns the mapping of a keyword that names the device."""
        return {"device": given} if isinstance(given, str) else given

    def contradictions(self) -> Iterator[str]:
        """Yields one problem for each contradiction of valid fields."""
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

    @classmethod
    def keys(cls, path: str, why: str) -> Iterator[Key]:
        """Yields the keys of the section at a path; `why` is for the device."""
        for name, key in keys_of(cls, f"{path}.").items():
            device = k.optional(k.choice("none", "cpu", "nvme"))
            off = Key(key.path, device, "none", why)
            yield off if name == "device" else key


@dataclass(frozen=True, kw_only=True)
class OffloadOptimizer(_Offload):
    """The section `offload_optimizer`: master weights and moments off the accelerator, in pinned
    host memory ("cpu") or in files ("nvme").

    Raises:
      ConfigError: A wrong value, or a value that contradicts the device.

    Example:
      >>> OffloadOptimizer(ratio=0.5).device
      'cpu'
    """

    buffer_count: int = _buffers(4)
    ratio: float = setting("", k.FRACTION, 1.0, "the share that is offloaded, to the cpu")

    def contradictions(self) -> Iterator[str]:
        """Yields one problem for each contradiction of valid fields."""
        yield from super().contradictions()
        ratio = f"ratio = {as_text(self.ratio)}"
        if self.ratio == 0:
            yield f'{ratio} offloads nothing; set device to "none"'
        elif self.ratio < 1 and self.device == "nvme":
            yield f'{ratio} is for device "cpu"; with "nvme" leave it out or at 1.0'


@dataclass(frozen=True, kw_only=True)
class OffloadParam(_Offload):
    """The section `offload_param`: parameters off the accelerator, in pinned host memory ("cpu")
    or in files ("nvme"), copied in for each use.

    Raises:
      ConfigError: A wrong value, or a value that contradicts the device.

    Example:
      >>> OffloadParam(device="nvme", nvme_path="/local_nvme").max_in_cpu
      1000000000
    """

    buffer_count: int = _buffers(5)
    max_in_cpu: int = setting(
        "", k.SIZE, 1_000_000_000, "so many elements of the parameters stay in host memory"
    )


OFFLOAD: dict[str, type[OffloadOptimizer] | type[OffloadParam]] = {
    "offload_optimizer": OffloadOptimizer,
    "offload_param": OffloadParam,
}
"""The class of each offload section."""

NULLABLE = frozenset(f"{ZERO}.{section}" for section in OFFLOAD)
"""Sections that may be null, which is equivalent to omitting them."""
